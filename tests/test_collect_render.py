"""What an answer looks like on the desk, and that nothing in it acts."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.collect.marks import BIDI, visible
from tether.collect.mathml import ELEMENTS, formula
from tether.collect.render import LONGEST_MARKDOWN, render

WRITTEN = {
    "p",
    "br",
    "strong",
    "em",
    "s",
    "code",
    "pre",
    "div",
    "span",
    "a",
    "ul",
    "ol",
    "li",
    "blockquote",
    "hr",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
}
TAGS = ELEMENTS | WRITTEN
ATTRIBUTES = {"a": {"href", "target", "rel"}, "ol": {"start"}, "div": {"class"}, "span": {"class"}, "p": {"class"}, "code": {"class"}}


class Harmless(HTMLParser):
    """Fails on every element, attribute or address that is not known to be harmless."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert not name.startswith("on"), name
            assert name not in ("style", "src", "srcdoc", "id", "xlink:href"), name
            if tag not in ELEMENTS:
                assert name in ATTRIBUTES.get(tag, set()) | {"class"}, (tag, name)
            if name == "href":
                assert value is not None
                assert re.match(r"https?://|mailto:", value, re.IGNORECASE), value

    def handle_data(self, data: str) -> None:
        self.words += data


def shown(text: str) -> str:
    """The words that a reader sees, after the HTML was found to be harmless."""
    reader = Harmless()
    reader.feed(str(render(text).html))
    reader.close()
    return reader.words


HARMFUL = [
    "<script>alert(1)</script>",
    "<svg/onload=alert(1)>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x)",
    "[x](//evil.example/x)",
    "[x](file:///etc/passwd)",
    "<javascript:alert(1)>",
    "![x](javascript:alert(1))",
    "![x](http://evil.example/pixel.png)",
    '[x](http://a.example "onmouseover=alert(1)")',
    "[x](http://a.example/\"onmouseover='alert(1)')",
    "```<script>\n</code></pre><script>alert(1)</script>\n```",
    "    </code></pre><script>alert(1)</script>",
    r"$\href{javascript:alert(1)}{x}$",
    r"$\style{position:fixed}{x}$",
    r"$\class{choices}{x}$",
    r"$\text{<script>alert(1)</script>}$",
    r"$\text{&lt;img src=x onerror=alert(1)&gt;}$",
    r"$\hspace{-900em}x$ $\color{white}{x}$",
    "| <script> | [x](javascript:1) |\n|---|---|\n| <svg onload=x> | b |",
    "[x]: javascript:alert(1)\n\n[x]",
    "<!-- hidden -->",
    "<math><mtext></mtext><script>alert(1)</script></math>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "</div></article></form><form action=http://evil.example><button>",
]


@pytest.mark.parametrize("text", HARMFUL)
def test_nothing_in_an_answer_acts(text: str) -> None:
    shown(text)


@pytest.mark.parametrize("text", ["[x]()", "\u202e()", "[x](<>)", '[x](<> "title")', "[x](javascript:alert(1)"])
def test_a_link_without_an_address_is_text(text: str) -> None:
    assert "<a" not in render(text).html
    assert shown(text).startswith("[")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="<>[]()!\\`*_~#$&;:/\"'=ab \n|-{}^123.\u202e\x00", max_size=60))
def test_no_text_makes_html_that_acts(text: str) -> None:
    shown(text)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                r"\frac",
                r"\text",
                r"\href",
                r"\style",
                r"{",
                r"}",
                r"^",
                r"_",
                r"&",
                r"\\",
                r"\begin{matrix}",
                r"\end{matrix}",
                r"\left(",
                r"\right)",
                r"x",
                r"<",
                r">",
                r"1",
                r"\color{red}",
                r"\sqrt",
            ]
        ),
        max_size=12,
    )
)
def test_no_formula_makes_html_that_acts(parts: list[str]) -> None:
    reader = Harmless()
    reader.feed(formula(" ".join(parts), block=True))


def test_links_show_where_they_go() -> None:
    made = str(render("[docs](https://docs.example/a?b=1&c=2)").html)
    assert 'href="https://docs.example/a?b=1&amp;c=2"' in made
    assert 'rel="noopener noreferrer nofollow"' in made
    assert "(https://docs.example/a?b=1&c=2)" in shown("[docs](https://docs.example/a?b=1&c=2)")


def test_an_address_that_looks_like_another_is_shown_as_it_is() -> None:
    cyrillic = "[bank](https://\u0430pple.example)"
    assert "xn--" in shown(cyrillic)


@pytest.mark.parametrize(
    "mark", ["\u202e", "\u2066", "\u200f", "\u061c", "&#x202e;", "&#8238;", "$\\text{\u202ea}$", "`\u202e`", "\U000e0041"]
)
def test_marks_that_turn_a_line_round_become_visible(mark: str) -> None:
    words = shown(f"pay 10 {mark} 01 yap")
    assert not re.search(f"[{BIDI}\U000e0000-\U000e007f]", words)
    assert "[U+" in words


def test_control_characters_and_broken_text_are_signs() -> None:
    assert shown("a\x00b\x1bc\x7fd\udc80e").strip() == "a[U+0000]b[U+001B]c[U+007F]d\ufffde"
    assert visible("a\r\nb\rc") == "a\nb\nc"


def test_text_of_other_scripts_stays_itself() -> None:
    text = "שלום, مرحبا, नमस्ते, 你好, 👩\u200d🔬"
    assert shown(text).strip() == text


# -- nothing is hidden ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "> " * 60 + "secret",
        "- " * 200 + "secret",
        "[//]: # (secret)\n\nx",
        "[a]: http://x.example (secret)\n\nx",
        "[a](http://x.example 'secret')",
        "![a](http://x.example 'secret')",
        "```python secret\nx\n```",
        "<!-- secret -->",
    ],
)
def test_markdown_hides_nothing(text: str) -> None:
    assert "secret" in shown(text)


def test_where_formatting_leaves_something_out_the_text_itself_is_there() -> None:
    made = render("| a |\n|---|\n| x | dropped by the table |")
    assert made.written is not None
    assert "dropped by the table" in made.written
    assert render("Plain words.\n\nNo marks.").written is None


def test_a_long_text_is_whole_and_quick() -> None:
    text = "word " * LONGEST_MARKDOWN
    assert shown(text).count("word") == LONGEST_MARKDOWN


@pytest.mark.parametrize(
    "part", ["[", "*a_", "![[]()", "$x ", "\\[\n\n", "\\[a", "](", "> ", "<a", "`" * 3 + "\n", "a**b", "[](http://a.b)", "|a"]
)
def test_no_text_keeps_the_reader_busy(part: str) -> None:
    text = (part * (LONGEST_MARKDOWN // len(part)))[:LONGEST_MARKDOWN]
    began = time.process_time()
    render(text)
    assert time.process_time() - began < 5  # about 0.5 at the worst; what grows with the square of the text took 48


def test_lines_of_an_answer_stay_lines_and_those_of_guidelines_flow() -> None:
    assert str(render("Roses are red,\nviolets are blue").html).count("<br>") == 1
    flowing = str(render("# Be fair\n\nRead\nboth.", under=0, breaks=False).html)
    assert "<h1>Be fair</h1>" in flowing
    assert "<br>" not in flowing
    assert "<h3>" in str(render("# Title").html), "headings of an answer come below the page's"


# -- math ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["costs $5 and $10", "from $5-$10", "$ x $", "a $x", r"\$x\$", "$$", "US$ and A$", "`$x$`"])
def test_what_is_no_formula_stays_text(text: str) -> None:
    assert "<math" not in str(render(text).html)


@pytest.mark.parametrize(
    "text",
    [
        "$x$",
        "so $x^2$.",
        r"\(x\)",
        r"\[x\]",
        "$$x$$",
        "$$\nx\n= 1\n$$",
        "text\n$$\nx\n$$\nmore",
        "- $$\n  x\n  $$",
        "| $x$ |\n|---|\n| 1 |",
    ],
)
def test_formulas_are_mathml(text: str) -> None:
    made = str(render(text).html)
    assert made.count("<math") == 1
    assert "<mi>x</mi>" in made


def test_a_formula_that_cannot_be_read_is_shown_as_it_was_written() -> None:
    assert formula(r"\frac{1", block=False) == r'<code class="formula">\frac{1</code>'
    assert "{{{{" in formula("{" * 300, block=True)
    assert "\\sqrt" in formula(r"\sqrt" * 400, block=True)


def test_a_formula_cannot_push_over_its_neighbours() -> None:
    assert "width" not in formula(r"\hspace{-100em}x", block=False)
    assert 'width="2em"' in formula(r"\hspace{2em}x", block=False)
