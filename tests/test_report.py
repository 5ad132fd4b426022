"""report.html: what is embedded can break nothing and fits; a real browser draws, filters, colours, and runs nothing.

The browser is a headless Chromium, with its chromedriver and selenium; where one is missing its tests are skipped.
"""

import base64
import hashlib
import json
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

from core.records import Batch, Completions, Episodes
from utils.reporting.page import PANELS, embed_json, main, read_rollouts, run_data, thin, write_report
from utils.reporting.plots import running_mean
from utils.reporting.rollouts import rollout_rows

MEGABYTE = "🙂" * 250_000  # in UTF-8
HOSTILE = {
    "script": "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>",
    "textarea": "</textarea></pre></title>--></style><svg onload='window.ran = 1'>",
    "link": "<a href='javascript:window.ran = 1'>[x](javascript:window.ran=1)</a> {{library}} ${window.ran = 1}",
    "comment": "<!--<script>",
    "nul": "a\0b\x1b[31m\r\x7f",
    "surrogate": "a\ud800b\udc00c",
    "right to left": "\u202egnp.exe\u202c שלום עולם \u2066x\u2028y\u2029z",
    "emoji": MEGABYTE,
}


def write_run(folder, num_steps=30, rollouts=None, **config):
    """A run folder; `rollouts` holds the rows of each step."""
    (folder / "rollouts").mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            record = {"global_step": step, "env/return": step / num_steps, "entropy": None if step == 3 else 1 / step}
            record |= {
                name: 0.1 for panel in PANELS for name in panel.metrics if name[:4] not in ("env/", "entr", "test")
            }
            if step % 10 == 0:
                record |= {"test_env/return": step / num_steps, "test_env/return_ci": 0.05}
            file.write(json.dumps(record) + "\n")
    (folder / "config.json").write_text(json.dumps({"lr": 1e-3, "env_name": "poem"} | config))
    for step, rows in (rollouts or {}).items():
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row(i: int, group_size: int = 4, **fields) -> dict:
    text = f"<think>{i}</think>"
    return {"group": i // group_size, "task": 7, "text": text, "return": i / 10, "length": 3, "finished": True} | fields


def coloured_row(i: int) -> dict:
    lists = {"logprobs": [-2.0, -0.1, 0.0], "old_logprobs": [-1.9, -0.1, 0.0], "entropies": [1.5, 0.2, 0.0]}
    return (
        row(i, tokens=["<think>", str(i), "</think>"], advantage=i / 10 - 0.2, valid=1.0, prompt="<b>Count.</b>")
        | lists
    )


# Without a browser


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_embedded_json_ends_no_element_and_is_what_it_was(text):
    embedded = embed_json({text: [text, 0.5, None]})
    assert not set(embedded) & set("<>&\u2028\u2029\0")
    embedded.encode("utf-8")
    assert json.loads(embedded) == {text: [text, 0.5, None]}


def test_only_the_pages_own_scripts_may_run_and_nothing_is_loaded(tmp_path):
    run = write_run(
        tmp_path / "run", rollouts={1: [row(0, text=text) for text in HOSTILE.values()]}, note=HOSTILE["script"]
    )
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts}
    assert len(scripts) == 2 and set(re.search("script-src ([^;]*);", policy)[1].split()) == hashes
    assert policy.startswith("default-src 'none';") and not re.search("https?:|connect-src|unsafe-eval", policy)
    shell = page.replace(scripts[0], "").replace(scripts[1], "")
    assert "window.ran = 1<" not in shell and not re.search(r"<(link|img|iframe|svg|object|embed)\b", shell)
    assert "innerHTML" not in scripts[1] and "document.write" not in scripts[1] and "eval" not in scripts[1]


@pytest.mark.parametrize("size", [1, 4, 99, 100, 101, 10_007])
def test_thinning_keeps_the_ends_and_the_extremes(size):
    values = np.random.default_rng(size).normal(size=size)
    values[size // 3 : size // 2] = np.nan
    kept = thin(values, 100)
    assert len(kept) <= 100 and (np.diff(kept) > 0).all() and kept[0] == 0 and kept[-1] == size - 1
    assert np.nanmin(values) == np.nanmin(values[kept]) and np.nanmax(values) == np.nanmax(values[kept])
    assert np.isnan(values[kept]).any() == np.isnan(values).any(), "a gap stays one"


def test_running_mean_is_that_of_the_finite_neighbours():
    values = np.random.default_rng(0).normal(size=100)
    values[30:50] = np.nan
    near = [values[max(0, i - 5) : i + 6] for i in range(100)]
    expected = [np.mean(part[np.isfinite(part)]) if np.isfinite(part).any() else np.nan for part in near]
    np.testing.assert_allclose(running_mean(values), expected, atol=1e-12)


def test_rollouts_fit_their_budget(tmp_path):
    steps = range(1, 101)
    run = write_run(tmp_path / "run", rollouts={step: [row(i) for i in range(200)] for step in steps})
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    whole = read_rollouts(run / "rollouts", size)
    assert len(whole["rows"]) == 20_000 and whole["note"] == "20,000 rollouts of 100 steps"
    part = read_rollouts(run / "rollouts", size // 20)
    assert len(json.dumps(part["rows"])) < size / 10 and " of 100 steps" in part["note"]
    assert {row["step"] for row in part["rows"]} >= {1, 100}, "the ends of the run"
    few = read_rollouts(run / "rollouts", size // 100)
    last = [row for row in few["rows"] if row["step"] == 100]
    assert {0.0, 0.3, 19.6, 19.9} <= {row["return"] for row in last} and len(last) < 200 and len(last) % 4 == 0
    assert read_rollouts(tmp_path / "nowhere", 100) == {"rows": [], "note": ""}


def test_half_lines_and_missing_files_are_no_obstacle(tmp_path):
    run = write_run(tmp_path / "run", rollouts={2: [row(0), row(1)]})
    for path in (run / "metrics.jsonl", run / "rollouts" / "step_2.jsonl"):
        with path.open("a") as file:
            file.write('{"global_step": 31, "te')
    (run / "rollouts" / "notes.jsonl").write_text("not of a step")
    (run / "rollouts" / "step_3.jsonl").write_text("")
    (run / "rollouts" / "step_4.jsonl").write_text(json.dumps(row(0, valid=float("nan"))))
    (run / "config.json").unlink()
    described = run_data("run", run / "metrics.jsonl", 10_000)
    assert described["config"] is None and described["metrics"]["env/return"]["x"][-1] == 30
    assert described["metrics"]["entropy"]["y"][2] is None
    assert described["metrics"]["test_env/return"]["bars"] == [0.05] * 3
    assert [row.get("valid", 0) for row in described["rollouts"]["rows"]] == [0, 0, None]
    write_report([run], tmp_path / "report.html")
    assert not (tmp_path / "report.html.new").exists()


def test_runs_are_compared(tmp_path, capsys):
    runs = [str(write_run(tmp_path / name / "run", lr=lr)) for name, lr in (("a", 0.1), ("b", 0.2))]
    main([*runs, "--html", str(tmp_path / "report.html")])
    assert "report.html" in capsys.readouterr().out and not (tmp_path / "plot.png").exists()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == runs, "paths, since both names are `run`"
    assert [run["config"]["lr"] for run in data["runs"]] == [0.1, 0.2]
    main([*runs, "--out", str(tmp_path / "two.png")])
    assert (tmp_path / "two.png").exists()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "c"), "--html", str(tmp_path / "report.html")])
    assert "there is no" in capsys.readouterr().err


def test_tokens_are_written_with_what_is_known_of_each():
    texts = ["x🙂", "ab", "\xff"]
    ids = [[1, *b"x\xf0\x9f\x99\x82"], [1, *b"ab"], [1, 0xFF]]
    tokens, lengths = np.zeros((3, 8), int), np.array([6, 3, 2])
    for i, each in enumerate(ids):
        tokens[i, : len(each)] = each
    logprobs = -np.arange(24.0).reshape(3, 8)
    finished, one, columns = np.ones(3, bool), np.ones(3, int), np.arange(8)
    is_drawn = (columns >= 1) & (columns < lengths[:, None])
    completions = Completions(tokens, is_drawn, logprobs, lengths, one, finished, lengths - 1.0, 0 * lengths)
    scores, failed = {"return": np.arange(3.0)}, np.array([False, False, True])
    episodes = Episodes(completions, np.arange(3), texts, scores, failed, failures={}, times={})
    batch = Batch(
        tokens[[1], :4], is_drawn[[1], :4], logprobs[[1], :4], scores["return"][[1]], lengths[[1]], one[[1]],
        row=np.array([1]), advantages=np.full((1, 4), 0.5), entropies=np.array([[0, 0.25, 2, 0]]),
    )  # fmt: skip
    tokenizer = SimpleNamespace(hf=SimpleNamespace(decode=lambda ids: bytes(ids).decode("utf-8", "replace")))
    first, second, third = rollout_rows(episodes, 1, tokenizer, batch)
    assert first["tokens"] == ["x", "", "", "", "🙂"] and first["prompt"] == "\x01" and "advantage" not in first
    assert second["tokens"] == ["a", "b"] and list(second["logprobs"]) == [-9, -10]
    assert second["advantage"] == 0.5 and "old_logprobs" not in second and list(second["entropies"]) == [0.25, 2]
    assert "tokens" not in third and third["reward_failed"], "tokens of the first two groups only"
    assert rollout_rows(episodes, 1)[0].keys() == {"group", "task", "text", "return", "length", "finished"}


# In a browser


@pytest.fixture(scope="module")
def chromium():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("there is no Chromium, or no chromedriver (apt-get install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    yield browser
    browser.quit()


class Page:
    """A report in a browser."""

    def __init__(self, browser, runs, out):
        write_report(runs, out)
        self.browser, clock = browser, time.perf_counter()
        browser.get(out.as_uri())
        self.seconds = time.perf_counter() - clock
        self.wait("return [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.main-svg'))")

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, script):
        end = time.monotonic() + 60
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def choose(self, name, value):
        change = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        self.run(f"{change} e.dispatchEvent(new Event('input', {{bubbles: true}}))", name, value)

    def texts(self, selector="#rollouts pre"):
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def colours(self):
        return self.run("return [...document.querySelectorAll('#rollouts pre span')].map(e => e.style.background)")

    def check(self):
        """Nothing was refused, went wrong, was loaded or ran that should not."""
        assert self.browser.get_log("browser") == []
        assert self.run("return performance.getEntriesByType('resource').length") == 0
        assert self.run("return window.ran") is None and self.run("return document.scripts.length") == 3


def test_curves_are_drawn_and_runs_can_be_hidden(chromium, tmp_path):
    page = Page(
        chromium, [write_run(tmp_path / name, lr=lr) for name, lr in (("a", 1), ("<b>b", 2))], tmp_path / "r.html"
    )
    count = "return [...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('.scatterlayer .trace').length)"
    drawn = page.run(count)
    assert len(drawn) >= 10 and min(drawn) >= 2, "a trace for each run in each panel"
    assert page.run("return document.querySelectorAll('.plot .errorbar').length") == 6
    assert page.texts("#curves h3")[0] == "Return" and all(page.texts("#curves .note"))
    assert page.texts("#runs .run") == ["a", "<b>b"] and len(page.texts("#summary tbody tr")) == 2
    assert page.texts("#settings .differs th") == ["lr"]
    page.run("document.querySelectorAll('.run')[0].click()")
    assert sum(page.run(count)) == sum(drawn) / 2
    theme = "return getComputedStyle(document.body).backgroundColor"
    before = page.run(theme)
    page.run("document.getElementById('theme').click()")
    assert page.run(theme) != before
    page.check()


def test_filters_and_colours(chromium, tmp_path):
    rollouts = {1: [row(i) for i in range(8)], 2: [coloured_row(i) for i in range(16)]}
    page = Page(chromium, [write_run(tmp_path / "run", rollouts=rollouts)], tmp_path / "report.html")
    assert len(page.texts()) == 20, "ten completions of the last step, and their prompts"
    assert page.texts()[:2] == ["<b>Count.</b>", "<think>0</think>"]
    page.run("document.getElementById('next').click()")
    assert page.texts("#place") == ["11 to 16 of 16"]
    seen = {}
    for colour in ("advantage", "log-prob", "ratio", "entropy", ""):
        page.choose("colour", colour)
        seen[colour] = tuple(page.colours())
        assert page.texts("#rollouts article:first-child > pre") == ["<think>10</think>"]
    assert len(set(seen.values())) == 5 and not any(seen[""])
    assert page.run("return document.querySelector('#rollouts pre span').title") == ""
    narrower = [("step", "1", 8), ("group", "1", 4), ("least", "0.55", 2), ("most", "0.65", 1), ("search", ">9<", 0)]
    for name, value, expected in narrower:
        page.choose(name, value)
        assert len(page.texts("#rollouts article")) == expected, name
    for name in ("step", "group", "least", "most", "search"):
        page.choose(name, "")
    page.choose("order", "best")
    assert page.texts("#rollouts article:first-child .reward") == ["1.5"] and page.texts("#place") == ["1 to 10 of 24"]
    page.check()


def test_hostile_text_is_shown_as_text_and_nothing_runs(chromium, tmp_path):
    rows = [row(0, text=text, **{f"<i>{name}": 1.0}) for name, text in HOSTILE.items()]
    rows += [row(1, text="", tokens=[text, text], logprobs=[-1, -2]) for text in HOSTILE.values()]
    rows += [
        row(2, tokens="no list", logprobs=3, advantage="?"),
        {"text": None},
        {"group": "<b>", "tokens": [1, None, {}]},
    ]
    config = {"note": HOSTILE["script"], HOSTILE["textarea"]: HOSTILE["link"]}
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", rollouts={1: rows}, **config)
    page = Page(chromium, [run], tmp_path / "report.html")
    assert page.run("return document.title").startswith("<img src=x")
    texts = page.texts()
    for shown, name in zip(texts, HOSTILE, strict=False):
        if name in ("script", "textarea", "link", "comment"):
            assert shown == HOSTILE[name]
    shown = dict(zip(HOSTILE, texts, strict=False))
    assert shown["nul"] == "a⟨0000⟩b⟨001B⟩[31m⟨000D⟩⟨007F⟩" and shown["surrogate"] == "a⟨D800⟩b⟨DC00⟩c"
    assert shown["right to left"] == "⟨202E⟩gnp.exe⟨202C⟩ שלום עולם ⟨2066⟩x\u2028y\u2029z"
    assert shown["emoji"] == "🙂" * 2000, "the beginning, until one asks for all"
    page.run("document.querySelector('#rollouts pre + button').click()")
    assert page.texts()[list(HOSTILE).index("emoji")] == MEGABYTE
    page.choose("colour", "log-prob")
    page.run("document.getElementById('next').click()")
    assert page.texts("#place") == ["11 to 19 of 19"]
    page.check()


def test_100_000_rollouts_and_10_000_steps_open_at_once(chromium, tmp_path):
    texts = [" ".join(map(str, range(i % 50, i % 50 + 40))) for i in range(1000)]
    rows = [row(i, text=text) for i, text in enumerate(texts)]
    run = write_run(tmp_path / "run", num_steps=10_000, rollouts=dict.fromkeys(range(1, 101), rows))
    page = Page(chromium, [run], tmp_path / "report.html")
    assert page.seconds < 5 and len(page.texts()) == 10
    assert page.run("return document.querySelectorAll('#rollouts *').length") < 500, "only what is seen"
    page.choose("step", "")
    assert int(page.texts("#place")[0].split()[-1].replace(",", "")) > 30_000
    page.check()
