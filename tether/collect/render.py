"""What a model or a person wrote -> HTML: Markdown, code and math, and never anything that acts.

Markup in an answer is shown as text. Links go to http, https and mailto only and show where they go; pictures are not loaded.
The page's Content-Security-Policy would stop a script all the same: this is the first of two walls.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup

from tether.collect.marks import visible
from tether.collect.mathml import LONGEST_FORMULA, formula

# A Markdown reader's time can grow faster than its text; longer answers are shown as they were written, whole.
LONGEST_MARKDOWN = 30_000  # characters
# A reader leaves out what lies deeper than its limit: a text that comes near is shown as it was written, too.
DEEPEST = 40
ADDRESS = re.compile(r"(?:https?://|mailto:)[^\s]+", re.IGNORECASE)
BLOCKS = {"$$": "$$", "\\[": "\\]"}
LONGEST_BLOCK = 60  # lines of one formula
INLINE = {"$$": "$$", "\\(": "\\)", "\\[": "\\]"}


@dataclass(frozen=True)
class Rendered:
    """`html` is safe; `written` is the text itself where the formatting hides some of it (a mark, a title, a cell), else None."""

    html: Markup
    written: str | None


@lru_cache(maxsize=128)
def render(text: str, *, under: int = 2, breaks: bool = True) -> Rendered:
    """Safe HTML of a text; its headings come below those of level `under` of the page. `breaks` keeps the ends of its lines.

    >>> render("**so** <b>and</b> $x$").html
    Markup('<p><strong>so</strong> &lt;b&gt;and&lt;/b&gt; <math display="inline"><mrow><mi>x</mi></mrow></math></p>')
    """
    shown = visible(text)
    if not shown.strip():
        return Rendered(Markup('<p class="none">(an empty answer)</p>'), None)
    if len(shown) <= LONGEST_MARKDOWN:
        reader = _reader()
        tokens = reader.parse(shown)
        if max((t.level for t in tokens), default=0) < DEEPEST - 2:
            # Entities such as &#x202e; are characters only now.
            made = visible(reader.renderer.render(tokens, reader.options, {"under": under, "breaks": breaks})).strip()
            return Rendered(Markup(made), None if _words(made) == " ".join(shown.split()) else shown)
    return Rendered(Markup(f'<p class="none">Shown as it was written.</p>\n<div class="written">{html.escape(shown)}</div>'), None)


def _words(made: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", made)).split())


@lru_cache(maxsize=1)
def _reader() -> MarkdownIt:
    options = {"html": False, "linkify": False, "maxNesting": DEEPEST}
    reader = MarkdownIt("commonmark", options, renderer_cls=Renderer)
    # Definitions of links would vanish from the page: they stay text.
    reader.enable(["table", "strikethrough"]).disable("reference")
    reader.validateLink = _may_link  # type: ignore[method-assign, assignment]
    # Before `escape`, which would read \( as a bracket, and before the blocks that would cut a formula up.
    reader.inline.ruler.before("escape", "math", _math_inline)
    reader.block.ruler.before("fence", "math", _math_block, {"alt": ["paragraph", "blockquote", "list"]})
    return reader


def _may_link(address: str) -> bool:
    return ADDRESS.fullmatch(address.strip()) is not None


# -- math ----------------------------------------------------------------------------------------------------------------


def _math_inline(state: StateInline, silent: bool) -> bool:
    r"""$...$, $$...$$, \(...\) and \[...\] inside a line. A single $ follows Pandoc's rule, so that prices stay prices:
    no blank inside next to either $, no digit after the closing one."""
    here, text = state.pos, state.src
    opening = text[here : here + 2]
    if opening in INLINE:
        closing, block = INLINE[opening], opening != "\\("
        start = here + 2
        end = text.find(closing, start, min(state.posMax, start + LONGEST_FORMULA))
        if end < 0 or not text[start:end].strip():
            return False
    elif text[here] == "$":
        closing, block, start = "$", False, here + 1
        found = _closing_dollar(text, start, min(state.posMax, start + LONGEST_FORMULA))
        if found is None:
            return False
        end = found
    else:
        return False
    if not silent:
        token = state.push("math", "", 0)
        token.content, token.meta = text[start:end].strip(), {"block": block}
    state.pos = end + len(closing)
    return True


def _closing_dollar(text: str, start: int, stop: int) -> int | None:
    if start >= stop or text[start].isspace():
        return None
    end = text.find("$", start, stop)
    while end > 0 and text[end - 1] == "\\":
        end = text.find("$", end + 1, stop)
    if end <= start or text[end - 1].isspace() or text[end + 1 : end + 2].isdigit():
        return None
    return end


def _math_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    r"""A formula on lines of its own, from $$ to $$ or \[ to \]. Without its end it is plain text."""
    begin, end = state.bMarks[first] + state.tShift[first], state.eMarks[first]
    opening = state.src[begin : begin + 2]
    if opening not in BLOCKS:
        return False
    closing = BLOCKS[opening]
    lines, line = [state.src[begin + 2 : end]], first
    while not lines[-1].rstrip().endswith(closing):
        line += 1
        if line >= last or line > first + LONGEST_BLOCK or closing in lines[-1]:
            return False  # no end in reach, or something follows on its line: a matter for the inline rule
        lines.append(state.src[state.bMarks[line] + min(state.tShift[line], state.blkIndent) : state.eMarks[line]])
    content = "\n".join(lines).rstrip().removesuffix(closing).strip()
    if not content or closing in content:
        return False
    if not silent:
        token = state.push("math", "", 0)
        token.content, token.meta, token.map = content, {"block": True}, [first, line + 1]
    state.line = line + 1
    return True


# -- HTML ----------------------------------------------------------------------------------------------------------------


class Renderer(RendererHTML):
    """What differs from plain CommonMark: links with their address, pictures as words, wide things in a box of their own."""

    def math(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        made = formula(token.content, block=token.meta["block"])
        return f'<span class="math">{made}</span>\n' if token.meta["block"] else made

    def softbreak(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return "<br>\n" if env["breaks"] else "\n"

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        address = str(tokens[idx].attrs.get("href", ""))
        if not address:  # [words](): without a place to go to it is no link, and stays what was written
            return "["
        return f'<a href="{html.escape(address)}" target="_blank" rel="noopener noreferrer nofollow">'

    def link_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        depth = 0
        for token in reversed(tokens[:idx]):
            depth += {"link_close": 1, "link_open": -1}.get(token.type, 0)
            if depth < 0:
                break
        return f"{'</a> ' if token.attrs.get('href') else ']'}{_address(token, 'href')}"

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        words = self.renderInlineAsText(token.children or [], options, env)
        return f'<span class="picture">[picture, not loaded: {html.escape(words)} {_address(token, "src")}]</span>'

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        language = token.info.strip()
        name = f'<span class="language">{html.escape(language)}</span>' if language else ""
        return f'<div class="code">{name}<pre><code>{html.escape(token.content)}</code></pre></div>\n'

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f'<div class="code"><pre><code>{html.escape(tokens[idx].content)}</code></pre></div>\n'

    def heading_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"<h{_level(tokens[idx], env)}>"

    def heading_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"</h{_level(tokens[idx], env)}>\n"

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return '<div class="wide"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return "</table></div>\n"

    def th_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return f"<{tokens[idx].tag}{_side(tokens[idx])}>"

    td_open = th_open


def _address(token: Token, name: str) -> str:
    title = f" “{token.attrs['title']}”" if token.attrs.get("title") else ""
    return f'<span class="address">({html.escape(str(token.attrs.get(name, "")) + title)})</span>'


def _level(token: Token, env: EnvType) -> int:
    return min(6, int(token.tag[1:]) + int(env["under"]))


def _side(token: Token) -> str:
    """Alignment as a class: a style attribute is what the page's policy forbids."""
    found = re.search(r"text-align:(left|right|center)", str(token.attrs.get("style", "")))
    return f' class="{found.group(1)}"' if found else ""
