"""One way of writing for every way of writing: answer and gold go through the same cleaning before they are compared.

Only notation is changed here, never the value. What a unit, a label or a list is, `math_forms` decides.
"""

from __future__ import annotations

import re

from tether.rewards.math_extract import BOX, closing

TO_LATEX = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ",
        "∗": "*", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
        "ø": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
        "ℂ": r"\mathbb{C}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ",
        "φ": r"\phi ", "ω": r"\omega ", "σ": r"\sigma ", "Δ": r"\Delta ", "⟨": r"\langle ", "⟩": r"\rangle ", "∖": r"\setminus ",
        "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "⅛": r"\frac{1}{8}",
        "“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2003": " ", "\u200b": "",
        "，": ",", "、": ",", "。": ".", "；": ";", "：": ":", "％": "%",
    }
)  # fmt: skip
SUPER = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni")
SUB = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
FUNCTIONS = [
"arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "max", "min", "gcd", "lcm", "det", "lg"]  # fmt: skip
TEXT_MACRO = re.compile(
    r"\\(?:text|textrm|textbf|textit|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|rm|operatorname)\s*\*?\s*\{"
)
SIZES = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|limits|nolimits|mathstrut)(?![a-zA-Z])\.?"
)
RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge", "leqslant": "le",
    "geqslant": "ge", "lt": "<", "gt": ">", "neq": "ne", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "lbrack": "[",
    "rbrack": "]", "lparen": "(", "rparen": ")", "vert": "|", "lvert": "|", "rvert": "|", "mid": "|", "colon": ":", "ast": "*",
    "div": "/", "degree": "circ", "textdegree": "circ", "textdollar": "$", "dollar": "$", "percent": "%", "arctg": "arctan",
    "tg": "tan", "ctg": "cot", "lor": "text{ or }", "land": "text{ and }", "varphi": "phi", "bar": "overline", "backslash": "setminus",
    "times": "cdot", "ldots": "dots", "cdots": "dots",
}  # fmt: skip


def clean(text: str) -> str:
    """The text in one notation; doing it twice changes nothing more.

    >>> clean("$\\\\dfrac12$."), clean("x²+1"), clean("1{,}500"), clean("\\\\boxed{\\\\text{13}}")
    ('\\\\frac{1}{2}', 'x^{2}+1', '1500', '13')
    """
    for _ in range(4):
        cleaned = _clean_once(text)
        if cleaned == text:
            break
        text = cleaned
    return text


def _clean_once(text: str) -> str:
    s = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+", lambda m: "^{" + m.group().translate(SUPER) + "}", text)
    s = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m.group().translate(SUB) + "}", s).translate(TO_LATEX)
    s = "".join(chr(ord(c) - 0xFEE0) if "！" <= c <= "～" else c for c in s)
    s = _peel(s.strip())
    s = _unbox(s)
    # Layout that means nothing.
    s = SIZES.sub("", s)
    s = re.sub(r"(?<=\d)(?:\\[,;: !]|\{,\}|\\!|~)+(?=\d{3}(?!\d))", "", s.replace(r"\!", "")) if re.search(r"\d", s) else s
    s = s.replace("{,}", ",")
    s = re.sub(r"(?<!\\)\\(?:[,;: ]|quad|qquad|enspace|thinspace|hspace\{[^}]*\}|phantom\{[^}]*\})|~", " ", s)
    s = re.sub(r"\\([a-zA-Z]+)", lambda m: _renamed(m.group(1)), s)
    s = _texts(s)
    s = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ ", s)
    s = re.sub(r"\\overline\s*\{?([A-Z]{2})\}?", r"\1", s)  # a segment by its ends
    s = s.replace(r"\$", "$").replace(r"\%", "%")
    # Plain notation to LaTeX.
    s = (
        s.replace("**", "^")
        .replace("<=", r"\le ")
        .replace(">=", r"\ge ")
        .replace("!=", r"\ne ")
        .replace("+/-", r"\pm ")
        .replace("+-", r"\pm ")
    )
    s = re.sub(r"(?<![A-Za-z\\])sqrt\s*\(", r"\\sqrt(", s)
    s = _rooted(s)
    s = re.sub(rf"(?<![A-Za-z\\])({'|'.join(FUNCTIONS)})(?=[\s(\d{{\\^_]|[a-z]?$|[a-z]\b)", r"\\\1", s)
    s = re.sub(r"(?<![A-Za-z\\])(?:pi)(?![A-Za-z])", r"\\pi", s)
    s = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty", s)
    s = re.sub(r"(?<=[\d\w)}\]])\s*\*\s*(?=[\d\w(\\\[{])", r"\\cdot ", s)
    s = re.sub(r"\^\s*(-?\d+)", r"^{\1}", s)
    s = re.sub(r"\^\s*\(\s*(-?[\w./]+)\s*\)", r"^{\1}", s)
    s = _fractions(s)
    # Numbers.
    s = re.sub(r"(?<![\d.,(\[{])(\d{1,3}(?:,\d{3})+)(?![\d,]|\s*[)\]])", lambda m: m.group().replace(",", ""), s)
    s = re.sub(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d,/]| \d)", lambda m: m.group().replace(" ", ""), s)
    s = re.sub(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?![\w.])", r"\1\\cdot 10^{\2}", s)
    s = re.sub(r"(\d*)\.(\d*)(?:\\overline\s*\{?(\d+)\}?|\((\d+)\)(?!\d)|\\dot\s*\{?(\d)\}?(?!\d*\\dot))", _repeating, s)
    s = re.sub(r"(?<![\d.^_/{\w])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])", r"(\1+\\frac{\2}{\3})", s)
    s = re.sub(r"(?<![\d.^_/{\w])(\d+)\s*(\\frac\{\d+\}\{\d+\})", _mixed, s)
    s = re.sub(r"\s+", " ", s).strip()
    s = re.sub(r"(?<=\\)([a-zA-Z]+) (?![a-zA-Z])", r"\1", s)  # a blank after a command is needed before letters only
    return re.sub(r"(?<=[\w)}\]%°'$!])\s*[.,;:]+$", "", s) if not s.endswith("...") else s


def _renamed(name: str) -> str:
    new = RENAMED.get(name, name)
    return new if new in {"<", ">", "[", "]", "(", ")", "|", ":", "*", "/", "$"} else f"\\{new}"


def _peel(s: str) -> str:
    """Without the marks of Markdown and mathematics that surround all of it."""
    for opened, closed in (("**", "**"), ("__", "__"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ('"', '"')):
        inner = s[len(opened) : len(s) - len(closed)]
        if (
            len(s) > len(opened) + len(closed)
            and s.startswith(opened)
            and s.endswith(closed)
            and opened not in inner
            and closed not in inner
        ):
            return inner.strip()
    # Mathematics within words, as in "$x=2$ or $x=-3$" or "$\frac12$ cm".
    if s.count("$") >= 2 and s.count("$") % 2 == 0 and not re.search(r"\$\s*\d[\d.,]*\s*(?![^$]*\$)", s.split("$")[0] + "$"):
        parts = s.split("$")
        if all(p.strip() for p in parts[1::2]):
            return "".join(p if i % 2 else re.sub(r"([A-Za-z]{2,}(?: [A-Za-z]+)*)", r"\\text{\1}", p) for i, p in enumerate(parts)).strip()
    return s


def _unbox(s: str) -> str:
    while (match := BOX.search(s)) and match.group().endswith("{"):
        end = closing(s, match.end())
        if end is None:
            return s
        s = s[: match.start()] + s[match.end() : end] + s[end + 1 :]
    return s


def _texts(s: str) -> str:
    """Every macro for upright text becomes \\text{...}; around the whole, a number or a function's name it goes away."""
    at = 0
    while match := TEXT_MACRO.search(s, at):
        end = closing(s, match.end())
        if end is None:
            return s
        content = s[match.end() : end]
        word = content.strip()
        whole = not s[: match.start()].strip() and not s[end + 1 :].strip()
        if word in FUNCTIONS:
            new = f"\\{word} "
        elif whole or re.fullmatch(r"[-+\d.,/\s%]*", word) or (word in ("e", "i", "d", "π") and "mathrm" in match.group()):
            new = content
        else:
            new = f"\\text{{{content}}}"
        s = s[: match.start()] + new + s[end + 1 :]
        at = match.start() + (len(new) if new.startswith("\\text") else 0)
    return s


def _argument(s: str, at: int) -> tuple[str, int] | None:
    """(content, end) of the macro argument at `at`: a group in braces, one command or one character."""
    while at < len(s) and s[at] == " ":
        at += 1
    if at >= len(s):
        return None
    if s[at] == "{":
        end = closing(s, at + 1)
        return None if end is None else (s[at + 1 : end], end + 1)
    command = re.compile(r"\\[a-zA-Z]+").match(s, at)
    return (command.group(), command.end()) if command else (s[at], at + 1)


def _fractions(s: str) -> str:
    """\\frac12, \\frac{1}2, \\frac\\pi2 and \\binom52 with all their braces; a minus below a fraction's line moves before it."""
    for name in ("frac", "binom"):
        at = 0
        while (at := s.find(f"\\{name}", at)) >= 0:
            start = at + len(name) + 1
            first = _argument(s, start)
            second = _argument(s, first[1]) if first else None
            if first is None or second is None:
                break
            s = s[:at] + f"\\{name}{{{first[0]}}}{{{second[0]}}}" + s[second[1] :]
            at = start
    return s


def _rooted(s: str) -> str:
    """\\sqrt2, \\sqrt x and \\sqrt(x+1) with braces."""
    at = 0
    while (at := s.find("\\sqrt", at)) >= 0:
        start = at + 5
        index = re.compile(r"\s*\[[^\]]*\]").match(s, start)
        begin = index.end() if index else start
        at = start
        if begin < len(s) and s[begin] == "(":
            end = _round(s, begin)
            if end is not None:
                s = s[:begin] + "{" + s[begin + 1 : end] + "}" + s[end + 1 :]
            continue
        number = re.compile(r"\s*(\d+)").match(s, begin)
        found = (number.group(1), number.end()) if number and " " in s[begin : begin + 1] else _argument(s, begin)
        if found:
            s = s[:begin] + "{" + found[0] + "}" + s[found[1] :]
    return s


def _round(s: str, start: int) -> int | None:
    depth = 0
    for i in range(start, len(s)):
        depth += (s[i] == "(") - (s[i] == ")")
        if depth == 0:
            return i
    return None


def _mixed(match: re.Match[str]) -> str:
    """3\\frac{1}{2} is 3 + 1/2; before an improper fraction a number is a factor."""
    top, bottom = map(int, re.findall(r"\d+", match.group(2)))
    return f"({match.group(1)}+{match.group(2)})" if top < bottom else match.group()


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} = (16 - 1)/90, exactly."""
    whole, fixed = match.group(1) or "0", match.group(2)
    period = next(g for g in match.groups()[2:] if g is not None)
    top = int(whole + fixed + period) - int(whole + fixed)
    return f"\\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(fixed)}}}"
