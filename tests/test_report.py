"""The report page: self-contained, escaped, and saying in words what the curves say."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.made_runs import compared_folder, dpo_run, reward_run
from tether.errors import UserError
from tether.recipe import DPORecipe, SFTRecipe
from tether.report import report_html, write_report
from tether.report.findings import findings
from tether.report.view import RunView
from tether.run import Run

EMPTY = {"meta", "br", "hr", "img", "input", "link"}


class Checked(HTMLParser):
    """Collects tags, attributes and text; every element must be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> out of order"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(html: str) -> Checked:
    parser = Checked()
    parser.feed(html)
    assert parser.open == []
    return parser


def words_of(html: str) -> str:
    """The page's text without its style sheet, spaces made single."""
    return " ".join(" ".join(checked(re.sub(r"<style>.*?</style>", "", html, flags=re.S)).text).split())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared_folder(tmp_path_factory.mktemp("compared"))


def log_run(folder: Path, rows: list[dict[str, object]], summary: dict[str, object] | None = None, **settings: object) -> Path:
    """A DPO run with exactly these rows of metrics."""
    with Run.create(folder, DPORecipe(model="m", data="d.jsonl", **settings), "dpo") as run:
        for step, row in enumerate(rows, start=1):
            run.log(step, row)
        if summary is not None:
            run.finish(summary)
    return folder


def test_an_answer_may_hold_any_line_separator(tmp_path: Path) -> None:
    """JSON leaves U+2028 and its like as they are; only a newline ends a row."""
    folder = compared_folder(tmp_path)
    path = folder / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    rows[0]["after"]["text"] = "one\u2028two\x85three\x0cfour\u2029five"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert "five" in words_of(report_html(folder))


# The page as a file -----------------------------------------------------------------------------------------------------------


def test_page_needs_nothing_from_outside(compared: Path) -> None:
    page = write_report(compared).read_text(encoding="utf-8")
    parser = checked(page)
    assert not {"script", "link", "img", "iframe"} & set(parser.tags)
    assert not [(name, value) for name, value in parser.attributes if name in ("src", "href") and not str(value).startswith("#")]
    assert not re.search(r"https?:|@import|url\(", page)
    assert "default-src 'none'" in page


def test_page_follows_the_readers_colours_and_width(compared: Path) -> None:
    page = report_html(compared)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport" content="width=device-width' in page


def test_every_text_from_outside_is_escaped(tmp_path: Path) -> None:
    evil = '<script>alert(1)</script> & "quoted"'
    with Run.create(tmp_path / "run", DPORecipe(model=evil, data="d.jsonl"), "dpo") as run:
        run.log(1, {"loss": 0.5, "<img src=x>": 1.0, "skipped": 1, "skip_reason": evil})
        run.append("pairs.jsonl", 1, [{"pair": 0, "source": evil, "chosen_up": -1.0, "rejected_down": 2.0, "similarity": 0.5}])
        run.log(1, {"displacement/chosen": -1.0, "displacement/rejected": -2.0})
        run.note(evil, evil, action="drop")
        run.append("samples.jsonl", 1, [{"prompt": evil, "before": {"text": evil}, "after": {"text": evil, "numbers": {evil: 1}}}])
    page = report_html(tmp_path / "run")
    assert "<script" not in page
    assert "<img" not in page
    assert words_of(page).count("<script>alert(1)</script>") >= 6


def test_making_it_needs_no_torch(compared: Path) -> None:
    code = (
        "import sys; from tether.report import write_report; write_report(sys.argv[1]); "
        "assert not [m for m in sys.modules if m in ('torch', 'transformers')]"
    )
    subprocess.run([sys.executable, "-c", code, str(compared)], check=True, timeout=60)


def test_report_can_be_made_again_and_is_the_same(compared: Path) -> None:
    first = write_report(compared).read_bytes()
    assert write_report(compared).read_bytes() == first


def test_folder_that_is_no_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no recipe\.yaml"):
        write_report(tmp_path)


def test_broken_comparison_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text('{"title": "x"}')
    with pytest.raises(UserError, match=r"comparison\.json"):
        write_report(tmp_path)


# What is on it ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", ["one", "several"])
def test_headings_leave_no_level_out_and_wide_tables_take_the_keyboard(compared: Path, tmp_path: Path, parts: str) -> None:
    page = report_html(compared if parts == "several" else dpo_run(tmp_path / "run"))
    levels = [int(n) for n in re.findall(r"<h([1-6])", page)]
    assert levels[:2] == [1, 2]
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    tables = re.findall(r"<div class=\"wide\"[^>]*>", page)
    assert tables
    assert all('tabindex="0"' in tag and re.search('aria-label="[^"]', tag) for tag in tables)


def test_header_says_what_when_and_on_which_machine(tmp_path: Path) -> None:
    words = words_of(report_html(dpo_run(tmp_path / "run")))
    for told in ("Preference optimisation (dpo)", "smollm2", "400 pairs", "bf16", "UTC", "core", "tether 0.1.0"):
        assert told in words


def test_every_chart_has_axes_units_and_its_numbers_as_a_table(compared: Path) -> None:
    page = report_html(compared)
    figures = re.findall(r"<figure.*?</figure>", page, flags=re.S)
    assert len(figures) > 15
    for figure in figures:
        assert 'role="img" aria-label="' in figure
        assert len(re.findall(r'class="label"', figure)) >= 1
        assert "<details><summary>Numbers</summary>" in figure
        assert "nan" not in re.sub(r"<figcaption>.*?</figcaption>", "", figure).lower().replace("finance", "")


def test_dropped_and_cut_rows_are_counted_and_listed(tmp_path: Path) -> None:
    words = words_of(report_html(dpo_run(tmp_path / "run")))
    assert "20 rows left out and 1 row cut at max_length" in words
    assert "identical: 20 rows left out" in words
    assert "pairs.jsonl:3: chosen and rejected are the same" in words
    assert "and 8 more in notices.jsonl" in words


def test_worst_pairs_are_listed_with_their_place(tmp_path: Path) -> None:
    folder = dpo_run(tmp_path / "run")
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    worst = min(pairs, key=lambda p: p["chosen_up"])
    table = re.search(r"fell furthest</h4>.*?<tbody>(.*?)</tbody>", report_html(folder), flags=re.S)
    assert table is not None
    assert worst["source"] in table.group(1).split("</tr>")[0]


def test_reward_model_shows_accuracy_calibration_and_length(tmp_path: Path) -> None:
    words = words_of(report_html(reward_run(tmp_path / "run")))
    assert "agrees with the people in 66 % (95 % interval 56 % to 75 %)" in words
    assert "correlation 0.41" in words
    assert "perfectly calibrated" in words


def test_samples_stand_side_by_side(compared: Path) -> None:
    words = words_of(report_html(compared))
    assert words.count("What is it like to keep bees?") == 3
    assert "It is <b>busy</b> & quiet work." in words


def test_comparison_shows_each_gain_with_its_interval(compared: Path) -> None:
    words = words_of(report_html(compared))
    assert "Change +0.18, 95 % interval +0.11 to +0.25" in words
    assert "Sentiment 0.28 0.46 +0.18 +0.11 to +0.25 rose" in words


@pytest.mark.parametrize("steps", [1, 2, 3000])
def test_runs_of_any_length_make_a_page(tmp_path: Path, steps: int) -> None:
    rows: list[dict[str, object]] = [{"loss": 1 / (i + 1), "grad_norm": 1.0, "learning_rate": 1e-5} for i in range(steps)]
    page = report_html(log_run(tmp_path / "run", rows, {"steps": steps}))
    checked(page)
    assert len(page) < 150_000


def test_run_without_a_step_makes_a_page(tmp_path: Path) -> None:
    words = words_of(report_html(log_run(tmp_path / "run", [])))
    assert "This run has not finished: 0 steps so far." in words


def test_sft_run_makes_a_page(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", SFTRecipe(model="m", data="d.jsonl"), "sft") as run:
        for step in range(1, 31):
            run.log(step, {"loss": 3 - step / 20, "mean_token_accuracy": 0.3 + step / 100, "entropy": 2.0})
        run.finish({"steps": 30, "rows": 240})
    assert "The loss fell from 2.85 to 1.62 nats per token" in words_of(report_html(tmp_path / "run"))


# Findings ---------------------------------------------------------------------------------------------------------------------


def told(folder: Path) -> dict[str, str]:
    """The findings of a run, as tone: all of their text."""
    out: dict[str, str] = {}
    for f in findings(RunView.read(folder)):
        out[f.tone] = out.get(f.tone, "") + f" {f.text} {f.remedy}"
    return out


def test_falling_chosen_answers_are_told_with_the_remedies(tmp_path: Path) -> None:
    watch = told(dpo_run(tmp_path / "run"))["watch"]
    assert "Likelihood displacement" in watch
    for remedy in ("dpo_nll_seq", "dpop", "dpo_norm", "min_edit_distance"):
        assert remedy in watch


def test_a_remedy_already_taken_is_not_offered(tmp_path: Path) -> None:
    row: dict[str, object] = {"displacement/chosen": -2.0, "displacement/rejected": -5.0, "displacement/frac_chosen_down": 1.0}
    watch = told(log_run(tmp_path / "run", [row] * 10, {"steps": 10}, loss_type="dpop", lambda_dpop=5.0))["watch"]
    assert "loss_type=dpop" not in watch
    assert "loss_type=dpo_nll_seq" in watch


def test_rising_chosen_answers_are_no_displacement(tmp_path: Path) -> None:
    said = told(dpo_run(tmp_path / "run", chosen_falls=False))
    assert "displacement" not in said.get("watch", "")
    assert "chosen answers became more likely" in said["good"]


def test_displacement_arithmetic(tmp_path: Path) -> None:
    """chosen -2, rejected -5: margin -2 - (-5) = +3."""
    row: dict[str, object] = {"displacement/chosen": -2.0, "displacement/rejected": -5.0}
    assert "The margin of +3 nats" in told(log_run(tmp_path / "run", [row] * 10, {"steps": 10}))["watch"]


def test_a_model_that_did_not_move_is_told(tmp_path: Path) -> None:
    row: dict[str, object] = {"displacement/chosen": 0.001, "displacement/rejected": -0.001, "rewards/accuracies": 0.5}
    assert "hardly moved" in told(log_run(tmp_path / "run", [row] * 10, {"steps": 10}))["watch"]


def test_steps_that_were_not_applied_are_told_first(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"loss": 0.6, "skipped": 0}] * 3 + [
        {"loss": float("nan"), "skipped": 1, "skip_reason": "the loss is nan"}
    ]
    first = findings(RunView.read(log_run(tmp_path / "run", rows, {"steps": 4})))[0]
    assert first.tone == "bad"
    assert "1 step of 4 could not be applied, at 4 (the loss is nan)" in first.text


def test_numbers_that_are_not_finite_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    losses = [0.7, 0.6, float("nan"), 0.5, float("inf"), 0.4, 0.3]
    page = report_html(log_run(tmp_path / "run", [{"loss": x} for x in losses], {"steps": 7}))
    assert "training: 2 of 7 values are not finite and leave gaps." in page
    assert len(re.findall(r"<polyline", page)) == 2  # 0.7-0.6 and 0.4-0.3; the lone 0.5 has no neighbour


def test_held_out_loss_that_turned_is_told(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"loss": 0.6 - i / 20, "eval_loss": y} for i, y in enumerate((0.69, 0.6, 0.65, 0.8))]
    assert "lowest at step 2 (0.6) and ended at 0.8: overfitting" in told(log_run(tmp_path / "run", rows, {"steps": 4}))["watch"]


def test_accuracy_that_may_be_guessing_is_told(tmp_path: Path) -> None:
    assert "cannot be told from guessing" in told(reward_run(tmp_path / "run", right=55))["watch"]


def test_unfinished_run_says_how_to_go_on(tmp_path: Path) -> None:
    folder = dpo_run(tmp_path / "run", finished=False)
    assert f"tether resume {folder}" in told(folder)["watch"]


# In a browser -----------------------------------------------------------------------------------------------------------------

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
WITHOUT = "no Chromium on this machine: the page's layout is not checked (apt-get install chromium)"
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files"]

PROBE = """<!doctype html><body style="margin:0"><iframe id="f" src="{page}" style="width:{width}px;height:900px;border:0"></iframe>
<pre id="out"></pre><script>
document.getElementById('f').onload = function () {{
  const d = this.contentDocument, w = this.contentWindow, over = [];
  d.querySelectorAll('body *').forEach(e => {{
    const box = e.getBoundingClientRect();
    if (box.right > {width} + 1 && !e.closest('.wide') && !e.closest('svg')) over.push(e.tagName + ' ' + e.className);
  }});
  const text = [...d.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().height > 0)
    .map(t => t.getBoundingClientRect().height);
  document.getElementById('out').textContent = JSON.stringify({{
    scroll: d.documentElement.scrollWidth, over: over.slice(0, 5), smallest: Math.min(...text),
    paper: w.getComputedStyle(d.body).backgroundColor, ink: w.getComputedStyle(d.body).color,
    figures: d.querySelectorAll('figure').length,
    requests: w.performance.getEntriesByType('resource').length }});
}};
</script></body>"""


def look(page: Path, width: int, *, dark: bool = False) -> dict[str, object]:
    """What a browser makes of the page at this width."""
    assert CHROMIUM is not None
    probe = page.parent / f"probe-{width}.html"
    probe.write_text(PROBE.format(page=page.as_uri(), width=width))
    colours = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [CHROMIUM, *BROWSER, *colours, "--virtual-time-budget=8000", "--dump-dom", probe.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    found = re.search(r'<pre id="out">(\{.*?\})</pre>', dom, flags=re.S)
    assert found is not None, dom[-500:]
    return dict(json.loads(found.group(1)))


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_page_fits_the_screen(compared: Path, width: int) -> None:
    seen = look(write_report(compared), width)
    assert seen["scroll"] == width
    assert seen["over"] == []
    assert seen["requests"] == 0
    assert float(str(seen["smallest"])) >= 10  # px: labels of charts stay readable


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
def test_page_has_a_dark_face(compared: Path) -> None:
    light, dark = look(write_report(compared), 1280), look(write_report(compared), 1280, dark=True)
    assert light["paper"] != dark["paper"]

    def brightness(colour: object) -> float:
        return sum(float(x) for x in re.findall(r"[\d.]+", str(colour))[:3])

    assert brightness(light["paper"]) > 600 > 200 > brightness(light["ink"])
    assert brightness(dark["paper"]) < 150 < 600 < brightness(dark["ink"])
