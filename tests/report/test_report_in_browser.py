"""The report of a run, a comparison and the live page, as a reader meets them: in a browser, skipped without one."""

import json
import operator

import pytest

from fullshard.report import charts as library
from fullshard.report.compare import comparison
from fullshard.report.html_report import render
from fullshard.report.page import whole_page
from fullshard.report.run_record import read_run
from fullshard.report.serve import LivePage, LoopbackServer
from tests import page_checks
from tests.report.synthetic_runs import (
    HOSTILE,
    full_run,
    hostile_run,
    synthetic_metrics,
    synthetic_run,
    training_record,
)

WIDE, PHONE = (1280, 900), (360, 740)
CURVES = ("loss", "learning-rate", "grad-norm", "accuracy", "speed", "memory")
OF_SEVERAL = {*CURVES, "loss-tokens", "loss-time"}
OF_ONE_RUN = {*CURVES, "memory-step", "memory-parts", "communication-units", "lengths-1"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Files: the report of a run, a comparison of two, and the report of a hostile run."""
    place = tmp_path_factory.mktemp("pages")
    runs = [read_run(full_run(place / "first")), read_run(synthetic_run(place / "second", learning_rate=5e-4))]
    written = {
        "report": render(runs[0]),
        "comparison": whole_page(comparison(runs)),
        "hostile": render(read_run(hostile_run(place / "hostile"))),
    }
    for name, text in written.items():
        (place / f"{name}.html").write_text(text)
    return place


def opened(page, address):
    page.open(address)
    page.wait("document.body.dataset.drawn")
    page.settle()
    return page


def faults(page):
    """What is wrong with a page, whatever it shows."""
    names = page.run("[...document.querySelectorAll('[data-chart]')].map(one => one.dataset.chart)")
    parts = page_checks.colored_parts(page, "document.querySelectorAll('[data-chart]')")
    return [
        *page_checks.wider_than_the_view(page),
        *page_checks.faint_texts(page),
        *page_checks.keyboard_faults(page),
        *page_checks.empty_columns(page),
        *page_checks.colliding_texts(page),
        *page_checks.powers_on_axes(page),
        *page_checks.names_without_marks(page),
        *(f"nothing is drawn in {name}" for name, part in zip(names, parts, strict=True) if part < 0.4),
        *page_checks.left_the_page(page),
        *page.problems,
    ]


def chart(id):
    return f"document.querySelector('[data-chart=\"{id}\"]')"


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)")


# --- looks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "size", "dark"), [
    ("report", WIDE, False),
    pytest.param("report", PHONE, True, marks=pytest.mark.slow),
    pytest.param("report", WIDE, True, marks=pytest.mark.slow),
    ("comparison", PHONE, True),
    pytest.param("comparison", WIDE, False, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_page_is_sound(browser, pages, name, size, dark):
    with browser.page(*size, dark) as page:
        opened(page, pages / f"{name}.html")
        assert not faults(page)
        charts = set(page.run("[...document.querySelectorAll('[data-chart]')].map(one => one.dataset.chart)"))
        assert charts == (OF_ONE_RUN if name == "report" else OF_SEVERAL)


def test_the_title_says_what_was_trained_and_the_loss_comes_first(browser, pages):
    with browser.page(*WIDE) as page:
        opened(page, pages / "report.html")
        assert texts(page, "h1") == [page.run("document.title")] == ["LoRA of model on data"]
        assert texts(page, "header p") == ["first"], "the name of the run"
        boxes = page.run("""Object.fromEntries(['loss', 'learning-rate'].map(id => {
            const box = document.querySelector(`[data-chart="${id}"] svg`).getBoundingClientRect();
            return [id, [box.width, box.height]]; }))""")
        for loss, other in zip(boxes["loss"], boxes["learning-rate"], strict=True):
            assert loss > 1.4 * other


@pytest.mark.slow
def test_colors_follow_the_reader_s_choice(browser, pages):
    shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
    with browser.page(*WIDE) as page:
        opened(page, pages / "report.html")
        assert page.run(shade) > 700
        page.emulate(dark=True)
        assert page.run(shade) < 120


def test_paper_is_light_and_shows_everything(browser, pages):
    with browser.page(800, 900, dark=True, media="print") as page:
        opened(page, pages / "report.html")
        assert page.run("getComputedStyle(document.querySelector('nav')).display") == "none"
        ink = "getComputedStyle(document.body).color.match(/\\d+/g).map(Number).reduce((a, b) => a + b)"
        assert page.run(ink) < 200
        cut = "[...document.querySelectorAll('.scroll')].filter(one => one.scrollHeight > one.clientHeight + 1).length"
        assert page.run(cut) == 0
        assert page.printed().startswith(b"%PDF")
        assert not page.run("document.querySelectorAll('details[data-print]:not([open])').length")
        assert not page.problems


@pytest.mark.slow
def test_without_the_chart_library_the_tables_have_the_values(browser, pages, tmp_path, monkeypatch):
    monkeypatch.setattr("fullshard.report.page.chart_library", lambda: None)
    (tmp_path / "plain.html").write_text(render(read_run(pages / "first")))
    with browser.page(*WIDE) as page:
        page.open(tmp_path / "plain.html")
        assert library.PACKAGE in texts(page, "header .note")[0]
        assert page.run("document.querySelector('#loss table').checkVisibility()")
        assert not page.problems


# --- numbers --------------------------------------------------------------------------------------------------------


def test_charts_show_the_numbers_of_the_metrics(browser, pages):
    lines = [json.loads(line) for line in (pages / "first" / "metrics.jsonl").read_text().splitlines()]
    shown = {"loss": ("loss", "eval_loss"), "grad-norm": ("grad_norm",), "speed": ("tokens_per_second",)}
    with browser.page(*WIDE) as page:
        opened(page, pages / "report.html")
        for id, names in shown.items():
            wanted = [[(line["step"], line[name]) for line in lines if name in line] for name in names]
            data = page.run(f"fullshard.views['{id}'].view.data('values').map(one => [one.s, one.x, one.y])")
            assert [[(x, y) for s, x, y in data if s == number] for number in range(len(names))] == wanted
            # What is drawn: the corners of each line, from pixels back to values.
            drawn = page.run(f"""(() => {{
                const view = fullshard.views['{id}'].view, x = view.scale('x'), y = view.scale('y');
                const lines = [...{chart(id)}.querySelectorAll('.mark-line path')];
                const corners = line => line.getAttribute('d').match(/[-\\d.e]+,[-\\d.e]+/g);
                const value = ([left, top]) => [x.invert(left), y.invert(top)];
                return lines.map(line => corners(line).map(pair => value(pair.split(',').map(Number))));
            }})()""")
            assert len(drawn) == len(wanted)
            for line, points in zip(drawn, wanted, strict=True):
                flat = [value for point in points for value in point]
                assert [value for point in line for value in point] == pytest.approx(flat, rel=1e-2, abs=5e-3)
        rows = [row.split("\t") for row in page.run("document.querySelector('#loss details').open = true,"
                "document.querySelector('#loss tbody').innerText").splitlines()]  # fmt: skip
        values = {int(row[0].replace(",", "")): row[1] for row in rows if row[1]}
        assert values == {line["step"]: f"{line['loss']:,.6g}" for line in lines if "loss" in line}
        assert page.run("fullshard.json('metrics').loss") == [line.get("loss") for line in lines]
        facts = dict(zip(texts(page, "#summary-facts dt"), texts(page, "#summary-facts dd"), strict=True))
        assert facts["Training loss"].startswith(f"{training_record(100)['loss']:.4f} at the end")


def test_a_chart_answers_to_the_pointer_and_to_the_keyboard(browser, pages):
    with browser.page(*WIDE) as page:
        opened(page, pages / "report.html")
        place, wanted = chart("grad-norm"), training_record(50)["grad_norm"]
        page.run(f"{place}.scrollIntoView({{block: 'center'}})")
        page.settle()
        x, y = page.run(f"""(() => {{
            const view = fullshard.views['grad-norm'].view, box = {place}.querySelector('svg').getBoundingClientRect();
            const [left, top] = [view.scale('x')(50), view.scale('y')({wanted})];
            return [box.x + view.origin()[0] + left + 3, box.y + view.origin()[1] + top + 3];
        }})()""")
        page.point(x, y)
        page.wait("!tip.hidden")
        assert page.run("tip.textContent").split() == ["step", "50", "training", f"{wanted:.6g}"]
        page.point(5, 5)
        page.wait("tip.hidden")
        page.run(f"{place}.focus()")
        page.settle()
        for key, step in (("End", 100), ("ArrowLeft", 95), ("Home", 5), ("ArrowLeft", 5), ("ArrowRight", 10)):
            page.press(key)
            at, value = page.run("tip.textContent").splitlines()
            assert int(at) == step and float(value.split()[-1]) == pytest.approx(
                training_record(step)["grad_norm"], 1e-5
            )
        page.press("Escape")
        assert page.run("tip.hidden") and not page.problems


def choose(page, choice, script):
    """Do something with a control, as a reader does, and wait until the charts have changed."""
    page.run(f"""(async () => {{ const one = document.querySelector('[data-choice="{choice}"]'); {script};
        one.dispatchEvent(new Event('input', {{bubbles: true}})); await new Promise(done => setTimeout(done)); }})()""")


def smoothed(values, weight):
    """Exponential means, the oracle written out: each value counts `weight` times as much as the one after it."""
    parts = [[weight**age for age in range(n, -1, -1)] for n in range(len(values))]
    return [sum(map(operator.mul, part, values)) / sum(part) for part in parts]


def test_curves_can_be_smoothed(browser, pages):
    lines = [json.loads(line) for line in (pages / "first" / "metrics.jsonl").read_text().splitlines()]
    wanted = [smoothed([line[name] for line in lines if name in line], 0.8) for name in ("loss", "eval_loss")]
    with browser.page(*WIDE) as page:
        opened(page, pages / "report.html")
        count = f"{chart('loss')}.querySelectorAll('.mark-line path').length"
        assert page.run(count) == 2
        choose(page, "smoothing", "one.valueAsNumber = 0.8")
        page.wait(f"{count} == 4")
        found = page.run("fullshard.views.loss.view.data('values').map(one => [one.s, one.m])")
        assert [[m for s, m in found if s == number] for number in (0, 1)] == [
            pytest.approx(line, rel=1e-9) for line in wanted
        ]
        # What is drawn, back from pixels: the values, faint, and what they were smoothed to, not faint.
        last = page.run(f"""[...{chart("loss")}.querySelectorAll('.mark-line path')].map(one => [
            fullshard.views.loss.view.scale('y').invert(Number(one.getAttribute('d').split(',').at(-1))),
            Number(one.getAttribute('opacity') ?? 1)])""")
        ends = [lines[-2].get("loss", training_record(100)["loss"]), wanted[0][-1], wanted[1][-1]]
        assert last[0] == [pytest.approx(training_record(100)["loss"], abs=0.02), 0.3]
        assert [tuple(one) for one in last[2:]] == [(pytest.approx(y, abs=0.02), 1) for y in ends[1:]]
        assert page.run("document.querySelector('#memory-step .mark-line path').getAttribute('opacity')") is None
        assert not faults(page)
        choose(page, "smoothing", "one.valueAsNumber = 0")
        page.wait(f"{count} == 2")


@pytest.mark.parametrize("size", [pytest.param(WIDE, marks=pytest.mark.slow), PHONE])
def test_curves_can_be_seen_on_a_log_axis(browser, pages, size):
    with browser.page(*size) as page:
        opened(page, pages / "report.html")
        kinds = "Object.fromEntries(Object.entries(fullshard.views).map(([id, one]) => [id, one.view.scale('y').type]))"
        choose(page, "log", "one.checked = true")
        page.wait(f"({kinds}).memory == 'log'")
        found = page.run(kinds)
        assert {id for id, kind in found.items() if kind == "log"} == set(CURVES), "not of memory and communication"
        assert not faults(page)


def test_a_curve_that_is_not_positive_stays_linear(browser, tmp_path):
    run = synthetic_run(tmp_path / "run", [{"step": n, "loss": n - 3.0, "grad_norm": n} for n in range(1, 9)])
    (tmp_path / "report.html").write_text(render(read_run(run)))
    with browser.page() as page:
        opened(page, tmp_path / "report.html")
        choose(page, "log", "one.checked = true")
        page.wait("fullshard.views['grad-norm'].view.scale('y').type == 'log'")
        assert page.run("fullshard.views.loss.view.scale('y').type") == "linear" and not page.problems


@pytest.mark.slow
def test_the_metrics_can_be_saved(browser, pages):
    with browser.page(*WIDE) as page:
        opened(page, pages / "report.html")
        page.run("""URL.createObjectURL = blob => (blob.text().then(text => { window.saved = text }), '#saved'), 0""")
        page.run("document.querySelector('button[data-csv]').click()")
        names, *rows = page.wait("window.saved").splitlines()
        lines = [dict(zip(names.split(","), row.split(","), strict=True)) for row in rows]
        assert [float(line["loss"]) for line in lines if line["loss"]] == [
            record["loss"] for record in synthetic_metrics() if "loss" in record
        ]
        assert not page.problems


def test_hostile_texts_are_shown_and_executed_nowhere(browser, pages):
    with browser.page(*WIDE) as page:
        opened(page, pages / "hostile.html")
        assert not page.problems and not page_checks.left_the_page(page)
        prompts = texts(page, "#answers article > pre")
        assert prompts == [text.replace("\x1b", "\ufffd").replace("\x00", "\ufffd") for text in HOSTILE]
        charts = "[...document.querySelectorAll('[data-chart^=metric]')].map(one => one.dataset.chart)"
        for id in page.run(charts):
            page.run(f"{chart(id)}.focus()")
            page.settle()
            page.press("End")
            assert page.run("tip.children.length") == 0
        assert not page.problems and page.pages == [page.pages[0]]


# --- live -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Pages ask more often than they would, and get an answer at once."""
    monkeypatch.setattr("fullshard.report.serve.PAGE_ASKS", 0.1)
    monkeypatch.setattr("fullshard.report.serve.SHARE_OF_TIME", float("inf"))


def append(folder, *records):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))


def test_the_live_page_follows_a_run(browser, tmp_path, monkeypatch, impatient):
    running = {"is": "process 1"}
    for module in ("serve", "compare"):
        monkeypatch.setattr(f"fullshard.report.{module}.lock_owner", lambda folder: running["is"])
    run = synthetic_run(tmp_path / "run", [training_record(step) for step in (5, 10, 15)])
    live = LivePage([run])
    with browser.page(1280, 500) as page, LoopbackServer({"/": live.whole, "/update": live.update}, 0) as server:
        opened(page, server.url)
        assert texts(page, "#live strong") == ["Running."] and "step 15 of 100" in texts(page, "#live p")[1]
        page.run(f"window.kept = {chart('loss')}.querySelector('svg'), {chart('grad-norm')}.scrollIntoView(), 0")
        page.run(
            f"document.querySelector('#speed details').open = true, {chart('speed')}.focus({{preventScroll: true}})"
        )
        before = page.run("scrollY")
        assert before > 0
        append(run, training_record(20))
        page.wait("fullshard.views['loss'].view.data('values').length == 4")
        page.wait("document.querySelector('#live p + p').textContent.includes('step 20 of 100')")
        page.settle()
        assert page.run(f"{chart('loss')}.querySelector('svg') === window.kept"), "the chart was drawn anew"
        assert page.run("scrollY") == before and page.run("document.querySelector('#speed details').open")
        assert page.run(f"document.activeElement === {chart('speed')}")
        choose(page, "smoothing", "one.valueAsNumber = 0.5")
        page.wait("fullshard.views['loss'].view.data('values')[3].m")
        append(run, {"step": 20, "eval_loss": 0.5})  # another line
        page.wait("fullshard.views['loss'].view.data('values').length == 5")
        assert page.run(f"{chart('loss')}.querySelectorAll('.mark-line path').length") == 4
        assert page.run("document.querySelector('[data-choice=smoothing]').valueAsNumber") == 0.5
        assert page.run("document.querySelector('.controls').checkVisibility()")
        choose(page, "smoothing", "one.valueAsNumber = 0")
        assert not faults(page)
        (run / "metrics.jsonl").write_text(json.dumps(training_record(5)) + "\n")  # resumed from a checkpoint
        page.wait("fullshard.views['loss'].view.data('values').length == 1")
        append(run, {"step": 5, "train_runtime": 1.0})
        running["is"], live.over = None, True
        page.wait(
            "document.querySelector('#live strong').textContent.startsWith('Finished at step 5. This page is no')"
        )
        assert not page.problems and page.pages == [server.url]


def test_the_live_page_says_that_nobody_answers(browser, tmp_path, impatient):
    run = synthetic_run(tmp_path / "run")
    live = LivePage([run])
    with browser.page() as page, LoopbackServer({"/": live.whole, "/update": live.update}, 0) as server:
        opened(page, server.url)
        offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        page.send("Network.emulateNetworkConditions", offline=True, **offline)
        page.wait("document.querySelector('#live strong').textContent.startsWith('Not connected')")
        page.send("Network.emulateNetworkConditions", offline=False, **offline)
        page.wait("document.querySelector('#live strong').textContent.startsWith('Finished')")


def test_the_live_page_says_that_it_belongs_to_an_earlier_server(browser, tmp_path, impatient):
    live = LivePage([synthetic_run(tmp_path / "run")])
    paths = {"/": live.whole, "/update": live.update}
    with browser.page() as page:
        with LoopbackServer(paths, 0) as server:
            opened(page, server.url)
        with LoopbackServer(paths, server.port):  # another token
            page.wait("document.querySelector('#live strong').textContent.includes('an earlier server')")
