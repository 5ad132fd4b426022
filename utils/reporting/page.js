"use strict";
// The page of report.html. Names, settings and completions are hostile: they become text nodes, never markup.

const data = JSON.parse(document.getElementById("data").textContent);
const { runs, panels, colors } = data;
const hidden = new Set(); // numbers of the runs that the curves leave out
const redraw = []; // functions that draw each panel anew
const redrawAll = () => redraw.forEach((draw) => draw());
/** A color of the day, and a lighter one for the night. */
const colorOf = (i) => {
  const color = colors[i % colors.length];
  return `light-dark(${color}, color-mix(in oklab, ${color} 60%, white))`;
};
const find = (id) => document.getElementById(id);

/** An element with these properties and children; strings become text. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Halves are rounded to even, as on the terminal: 0.5625 is 56.2%.
const rounding = { useGrouping: false, roundingMode: "halfEven" };
const percent = new Intl.NumberFormat("en", { ...rounding, style: "percent", minimumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0, roundingMode: "halfEven" });
const threeDigits = new Intl.NumberFormat("en", { ...rounding, maximumSignificantDigits: 3 });

/** A number as people read it. */
function short(value, unit = "") {
  if (typeof value !== "number") return "–";
  if (unit === "%") return percent.format(value);
  if (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(1);
  return Math.abs(value) < 100 ? threeDigits.format(value) : whole.format(value);
}

/** Text in which characters that cannot be seen, that turn the text around them or are half a pair stand as numbers. */
function visible(text) {
  const odd = /(?![\n\t])[\p{Cc}\p{Cs}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/gu;
  return String(text).replace(odd, (c) => `⟨${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// The runs: their names, and the first and last values that tell most

function drawHeader() {
  const title = runs.length === 1 ? visible(runs[0].name) : `${runs.length} runs`;
  document.title = `${title} · lmpo`;
  find("title").textContent = title;
  if (runs.length > 1) {
    runs.forEach((run, i) => {
      const chip = make("button", { type: "button", className: "run" }, dot(i), visible(run.name));
      chip.setAttribute("aria-pressed", "true");
      chip.onclick = () => {
        hidden.has(i) ? hidden.delete(i) : hidden.add(i);
        chip.setAttribute("aria-pressed", String(!hidden.has(i)));
        redrawAll();
      };
      find("runs").append(chip);
    });
  }
  const columns = [
    ["Held-out correct", "test_env/correct_answer", "%"], ["Held-out return", "test_env/return", ""],
    ["Return", "env/return", ""], ["Length", "env/length", ""], ["Entropy", "entropy", ""],
    ["Seconds a step", "times/step", "median"],
  ].filter(([, metric]) => runs.some((run) => run.metrics[metric]));
  const head = ["Run", "Steps", ...columns.map(([label]) => label)].map((label) => make("th", { scope: "col" }, label));
  find("summary").append(make("thead", {}, make("tr", {}, ...head)));
  const body = runs.map((run, i) => {
    const cells = columns.map(([, metric, unit]) =>
      make("td", {}, (unit === "median" ? median : change)(run.metrics[metric], unit)));
    cells.unshift(make("td", {}, dot(i), visible(run.name)), make("td", {}, short(lastStep(run))));
    cells.forEach((cell, c) => cell.setAttribute("data-label", head[c].textContent));
    return make("tr", {}, ...cells);
  });
  find("summary").append(make("tbody", {}, ...body));
}

const dot = (i) => {
  const element = make("span", { className: "dot" });
  element.style.background = colorOf(i);
  return element;
};

const lastStep = (run) => Object.values(run.metrics).reduce((most, { x }) => Math.max(most, x.at(-1) ?? 0), 0);

function median(series) {
  const values = (series?.y ?? []).filter((y) => y != null).sort((a, b) => a - b);
  return `${short(values[Math.floor(values.length / 2)])} (median)`;
}

/** Text with its options, which are not broken at the end of a line. */
const prose = (text) => visible(text).split(/(--\w+)/).map((part, i) => (i % 2 ? make("code", {}, part) : part));

/** "first → last", with their intervals, or the only value; a line breaks at the arrow only. */
function change(series, unit) {
  if (!series) return "–";
  const [first, last] = [0, -1].map((i) => {
    const [value, low, high] = ["y", "low", "high"].map((name) => short(series[name]?.at(i), unit));
    return series.low?.at(i) == null ? value : `${value}\u00a0[${low},\u00a0${high}]`;
  });
  return series.x.length > 1 ? `${first} → ${last}` : `${first} (step ${short(series.x[0])} only)`;
}

// The verdict: in words, with the warnings of the run, each with its step and a way to rollouts that show it

const MANY = 12; // warnings of a run that are listed
const SHOWS = { // what of the rollouts shows the reason of a warning
  "env/finished": { order: "-length" }, "env/groups_without_signal": { order: "+return" }, entropy: { color: "entropy" },
};

const TASK = ["env_name", "env_options", "data_dir", "reward", "episode", "test_env_name", "test_env_options"];

function drawVerdict() {
  const others = TASK.filter((name) => new Set(runs.map((run) => JSON.stringify(run.config?.[name]))).size > 1);
  if (others.length) {
    const text = `These runs have different tasks (${others.join(", ")} differ): their scores cannot be compared.`;
    find("verdict").append(make("p", { className: "verdict worse", id: "tasks" }, text));
  }
  runs.forEach((run, r) => {
    const name = runs.length > 1 ? make("b", {}, dot(r), visible(run.name)) : null;
    const text = make("p", { className: `verdict ${run.verdict.kind}` }, ...prose(run.verdict.text));
    const first = run.events.length ? `What went wrong first, at step ${run.events[0].step}:` : "No warnings.";
    const events = run.events.slice(0, MANY).map((event) => make("li", {}, ...eventParts(event, r)));
    const rest = run.events.length - events.length;
    const more = rest > 0 ? make("p", { className: "note" }, `${rest} more are in events.jsonl.`) : null;
    const list = make("ul", { className: "events" }, ...events);
    find("verdict").append(make("div", { className: "card" }, name, text, make("p", {}, first), list, more));
  });
  watch(runs.filter((run) => run.origin.end === null));
}

const SILENCE = 3600; // seconds without a step, or as long as ten steps, after which a run is taken for killed

/** Says when the page was drawn, whether runs go on, and loads it again while one of them does. */
function watch(open) {
  const drawn = `Written at ${new Date(1000 * data.drawn).toLocaleString("sv").slice(0, 16)}`;
  find("live").textContent = `${drawn}, step ${runs.map(lastStep).join(", ")}.`;
  if (!open.length) return;
  const isLive = open.some((run) => {
    const longest = Math.max(...(run.metrics["times/step"]?.y ?? []));
    return Date.now() / 1000 - run.news < Math.max(SILENCE, 10 * longest);
  });
  const news = new Date(1000 * Math.max(...open.map((run) => run.news)));
  const going = isLive
    ? "The run goes on: this page loads itself again every minute while it is left alone."
    : `No news since ${news.toLocaleString("sv")}: the run was probably killed. Should it go on, load this page again.`;
  find("live").prepend(`${going} `);
  if (isLive) reloadWhenIdle();
}

/** A warning: its step, the sentence, a link to the panel of its metric, and one to rollouts of about that step. */
function eventParts(event, r) {
  const panel = panels.findIndex(({ metrics }) => event.metric in metrics);
  const toPanel = panel < 0 ? null : make("a", { href: `#panel-${panel}` }, "curve");
  const steps = [...new Set(runs[r].rollouts.rows.map((row) => row.step))];
  const nearest = steps.reduce((a, b) => (Math.abs(b - event.step) < Math.abs(a - event.step) ? b : a), steps[0]);
  const toRollouts = steps.length ? make("a", { href: "#rollouts-title" }, `rollouts of step ${nearest}`) : null;
  if (toRollouts) toRollouts.onclick = () => showRollouts(r, nearest, SHOWS[event.metric] ?? {});
  const links = [toPanel, toRollouts].filter(Boolean).flatMap((link) => [" · ", link]);
  return [make("b", {}, `step ${event.step}`), " ", ...prose(event.text), ...links];
}

/** Loads the page again after a minute in which nobody used it. */
function reloadWhenIdle() {
  let last = Date.now();
  for (const name of ["pointermove", "keydown", "scroll", "input"]) {
    addEventListener(name, () => { last = Date.now(); }, { passive: true });
  }
  setInterval(() => { if (Date.now() - last > 60_000) location.reload(); }, 5_000);
}

// Curves: curves.js draws

const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const isHeldOut = (metric) => /^(test|valid)_/.test(metric);

function drawCurves() {
  const logged = new Set(runs.flatMap((run) => Object.keys(run.metrics)));
  const shown = panels.filter(({ metrics }) => Object.keys(metrics).some((metric) => isHeldOut(metric)
    ? Object.keys(metrics).some((name) => logged.has(name))
    : runs.some((run) => run.metrics[metric]?.y.some(Boolean))));
  shown.forEach((panel) => addPanel(() => panel, make("h3", { id: `panel-${panels.indexOf(panel)}` }, panel.title)));
  const isOther = (name) => !/_(ci|low|high)$/.test(name) && shown.every((panel) => !(name in panel.metrics));
  const others = [...logged].filter(isOther).sort();
  if (!others.length) return;
  const choice = make("select", { ariaLabel: "Metric" }, ...others.map((name) => new Option(visible(name), name)));
  const any = () => ({ note: "Any other metric that was logged.", metrics: { [choice.value]: "" }, unit: "" });
  choice.onchange = addPanel(any, choice);
}

/** A card with curves; returns the function that draws them anew. */
function addPanel(panelOf, heading) {
  const key = make("div", { className: "key" });
  const plot = make("div", { className: "plot", role: "img" });
  const note = make("p", { className: "note" }, ...prose(panelOf().note));
  const top = make("div", { className: "heading" }, heading, key);
  find("curves").append(make("div", { className: "card" }, top, plot, note));
  const draw = () => {
    const panel = panelOf();
    const curves = curvesOf(panel);
    const metrics = new Map(curves.map((curve) => [curve.metric, curve]));
    key.replaceChildren(...(metrics.size > 1 ? [...metrics.values()].map(keyOf) : []));
    const told = curves.map((curve) => `${curve.name} ${change(curve.series, panel.unit)}`);
    plot.ariaLabel = `${panel.title ?? heading.value}: ${told.join("; ")}`;
    const marks = runs.flatMap((run, r) => (hidden.has(r) ? [] : run.events))
      .filter((event) => event.metric in panel.metrics).map(({ step, text }) => ({ step, text: visible(text) }));
    drawPlot(plot, curves, marks, (value) => short(value, panel.unit), redrawAll);
  };
  redraw.push(draw);
  draw();
  return draw;
}

/** What a panel shows: with one run a color for each metric, with several one for each run. */
function curvesOf(panel) {
  const curves = [];
  runs.forEach((run, r) => Object.entries(panel.metrics).forEach(([metric, label], m) => {
    if (!run.metrics[metric] || hidden.has(r)) return;
    const one = runs.length === 1;
    const isPair = Object.keys(panel.metrics).some(isHeldOut); // held out is dots: both may have one color
    const color = colorOf(one ? (isPair ? 0 : m) : r);
    const dash = one || isPair ? "" : DASHES[m % DASHES.length];
    const name = [one ? "" : visible(run.name), label].filter(Boolean).join(", ");
    const isShare = panel.unit === "%";
    curves.push({ series: run.metrics[metric], metric, isHeldOut: isHeldOut(metric), isShare, label, name, color, dash });
  }));
  return curves;
}

/** The sign of a metric beside its name. */
function keyOf({ label, isHeldOut, color, dash }) {
  const sign = make("i", { className: isHeldOut ? "held-out" : "" });
  sign.style.borderTop = `2px ${isHeldOut ? "dotted" : dash ? "dashed" : "solid"} currentColor`;
  if (runs.length === 1) sign.style.color = color;
  return make("span", {}, sign, label);
}

// Rollouts: filters choose rows, only the rows of one page become elements

const PAGE = 10; // rollouts on a page
const SHOWN = 4000; // characters of a completion before a button shows the rest
const state = { rows: [], page: 0 };
const KNOWN = ["step", "group", "task", "text", "return", "length", "finished", "prompt", "stop_reason", "advantage",
  "tokens", "logprobs", "old_logprobs", "ratios", "entropies", "drawn", "conversation", "change"];
const perToken = (row, name) =>
  Array.isArray(row[name]) && Array.isArray(row.tokens) && row[name].length === row.tokens.length ? row[name] : null;
const scoreNames = (row) => Object.keys(row).filter((name) => !KNOWN.includes(name) && typeof row[name] === "number");

// What colors tokens, blue above 0 and orange below; `reach` is where the scale ends (null: at the page's largest)
const COLORINGS = {
  "log-prob": { label: "log-probability (nats)", reach: 2, values: (row) => perToken(row, "logprobs") },
  advantage: { label: "advantage", reach: null, values: (row) => perToken(row, "advantage") },
  ratio: { label: "log of the ratio trainer / sampler", reach: 0.5, values: logRatios },
  entropy: { label: "entropy (nats)", reach: 2, values: (row) => perToken(row, "entropies") },
};

function logRatios(row) {
  const [given, old, sampled] = ["ratios", "old_logprobs", "logprobs"].map((name) => perToken(row, name));
  return given?.map((ratio) => Math.log(ratio)) ?? (old && sampled && old.map((value, i) => value - sampled[i]));
}

function shade(value, reach) {
  if (typeof value !== "number" || !Number.isFinite(value) || !reach) return "";
  const strength = Math.min(Math.abs(value) / reach, 1) * 0.6;
  return strength < 0.01 ? "" : `rgba(${value > 0 ? "37,99,235" : "234,88,12"},${strength.toFixed(3)})`;
}

function fillSelect(select, options, keep) {
  select.replaceChildren(...options.map(([label, value]) => new Option(label, value)));
  if (options.some(([, value]) => String(value) === keep)) select.value = keep;
}

function startRollouts() {
  const withRows = runs.map((run, i) => i).filter((i) => runs[i].rollouts.rows.length || runs[i].pairs.rows.length);
  find("run-label").hidden = withRows.length < 2;
  if (!withRows.length) {
    find("rollouts-note").textContent = "No rollouts were written.";
    for (const id of ["filters", "scale", "pages"]) find(id).hidden = true;
    return;
  }
  fillSelect(find("run"), withRows.map((i) => [visible(runs[i].name), i]));
  find("filters").onsubmit = (event) => event.preventDefault();
  find("filters").oninput = (event) => {
    if (event.target.id === "run") chooseRun();
    if (event.target.id === "step") listGroups();
    if (event.target.id === "color") find("raw").checked = true;
    else if (event.target.id !== "raw") filter();
    drawPage();
  };
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    find(id).onclick = () => {
      state.page += by;
      drawPage();
      find("rollouts-title").scrollIntoView();
    };
  }
  chooseRun();
  filter();
  drawPage();
}

const chosenRun = () => runs[+find("run").value];
const PAIRS = "pairs"; // in the place of a step: rollouts of the first and the last one, side by side

/** Shows rollouts of a step, in an order and a color that the fields of `fields` name. */
function showRollouts(r, step, fields) {
  find("run").value = r;
  chooseRun();
  for (const [id, value] of Object.entries({ step, group: "", order: "", ...fields })) {
    if ([...find(id).options].some((option) => option.value === String(value))) find(id).value = value;
  }
  listGroups();
  filter();
  drawPage();
}

function chooseRun() {
  const { rollouts: { rows, note }, pairs } = chosenRun();
  const whose = runs.length > 1 ? `${visible(chosenRun().name)}: ` : "";
  const about = "Completions of a group answer one problem; advantages compare them.";
  const beginning = pairs.note && `First and last: ${pairs.note}`;
  find("rollouts-note").textContent = [`${whose}${note}.`, about, beginning].join(" ");
  const steps = [...new Set(rows.map((row) => row.step))];
  const choices = [["all", ""], ...steps.map((step) => [step, step])];
  if (pairs.rows.length) choices.unshift(["first and last", PAIRS]);
  fillSelect(find("step"), choices, pairs.rows.length ? PAIRS : String(steps.at(-1)));
  const names = Object.keys(COLORINGS).filter((name) => rows.some((row) => COLORINGS[name].values(row)));
  const options = [["none", ""], ...names.map((name) => [name, name])];
  fillSelect(find("color"), options, find("color").value || names[0]);
  const scores = ["return", "length", "advantage", ...new Set([...pairs.rows, ...rows].flatMap(scoreNames))];
  const orders = scores.flatMap((name) =>
    [["-", "highest"], ["+", "lowest"]].map(([sign, end]) => [`${visible(name)}, ${end} first`, sign + name]));
  fillSelect(find("order"), [["as written", ""], ...orders], find("order").value);
  find("raw-label").hidden = ![...pairs.rows, ...rows].some((row) => Array.isArray(row.conversation));
  drawStrip(chosenRun().problems);
  listGroups();
}

function listGroups() {
  const step = find("step").value;
  const inStep = rowsOf(step);
  const groups = [...new Set(inStep.map((row) => row.group ?? 0))].sort((a, b) => a - b);
  fillSelect(find("group"), [["all", ""], ...groups.map((group) => [group, group])], find("group").value);
}

/** The rollouts of a step, of all ("") or of the pairs. */
function rowsOf(step) {
  if (step === PAIRS) return chosenRun().pairs.rows;
  return chosenRun().rollouts.rows.filter((row) => step === "" || String(row.step) === step);
}

function filter() {
  const [step, group, least, most, order] = ["step", "group", "least", "most", "order"].map((id) => find(id).value);
  const words = find("search").value.toLowerCase();
  const textOf = ({ text, prompt, conversation }) => JSON.stringify([text, prompt, conversation]).toLowerCase();
  const wanted = JSON.stringify(words).slice(1, -1);
  state.page = 0;
  state.rows = rowsOf(step).filter((row) => (group === "" || String(row.group ?? 0) === group)
    && (least === "" || row.return >= +least) && (most === "" || row.return <= +most)
    && (words === "" || textOf(row).includes(wanted)));
  const numberOf = (row) => (typeof row[order.slice(1)] === "number" ? row[order.slice(1)] : 0);
  if (order) state.rows.sort((a, b) => Number(`${order[0]}1`) * (numberOf(a) - numberOf(b)));
}

function drawPage() {
  const rows = state.rows.slice(state.page * PAGE, (state.page + 1) * PAGE);
  const coloring = COLORINGS[find("color").value];
  const values = rows.map((row) => coloring?.values(row) ?? null);
  const most = (x, each) => (Number.isFinite(each) ? Math.max(x, Math.abs(each)) : x);
  const reach = coloring?.reach ?? values.reduce((x, list) => (list ?? []).reduce(most, x), 0);
  find("rollouts").replaceChildren(...rows.flatMap((row, i) => [
    ...(row.change && row.change !== rows[i - 1]?.change ? [make("h3", {}, row.change)] : []),
    drawRow(row, values[i], reach),
  ]));
  drawScale(rows.every(isTalk) ? null : coloring, reach);
  const first = state.page * PAGE;
  const [from, to, of] = [first + 1, first + rows.length, state.rows.length].map((n) => n.toLocaleString("en"));
  find("place").textContent = rows.length ? `${from} to ${to} of ${of}` : "No rollout is like that.";
  find("previous").disabled = state.page === 0;
  find("next").disabled = first + PAGE >= state.rows.length;
}

function drawScale(coloring, reach) {
  if (!coloring) return find("scale").replaceChildren();
  const bar = make("i");
  const name = find("color").value;
  const [low, high] = name === "entropy" ? [0, reach] : name === "log-prob" ? [-reach, 0] : [-reach, reach];
  const stops = [low, (low + high) / 2, high].map((x) => shade(x, reach) || "transparent");
  bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  find("scale").replaceChildren(coloring.label, make("span", {}, short(low)), bar, make("span", {}, short(high)));
}

/** All held-out problems, gained ones first: how many of their completions were right at the first and last step. */
function drawStrip({ counts, steps }) {
  find("strip").hidden = !counts.length;
  if (!counts.length) return;
  const total = counts.reduce((sum, [, , , count]) => sum + count, 0);
  const classes = new Map();
  const cells = [];
  let x = 0;
  for (const [change, before, after, width] of counts) {
    [before, after].forEach((share, i) => {
      const place = { x, y: i + 0.1 * i, width, height: 0.9, class: change.split(" ").join("-") };
      const title = shape("title", {}, `${width} ${change}: ${short(before, "%")} → ${short(after, "%")}`);
      cells.push(shape("rect", { ...place, class: "cell" }, title.cloneNode(true)));
      cells.push(shape("rect", { ...place, "fill-opacity": share }, title));
    });
    x += width;
    classes.set(change, (classes.get(change) ?? 0) + width);
  }
  const picture = shape("svg", { viewBox: `0 0 ${total} 2`, preserveAspectRatio: "none", role: "img" }, ...cells);
  const keys = [...classes].map(([change, count]) => {
    const sign = make("i", { className: change.split(" ").join("-") });
    return make("span", {}, sign, make("b", {}, count.toLocaleString("en")), ` ${change}`);
  });
  const sides = make("div", { className: "sides" }, ...steps.map((step) => make("span", {}, `step ${step}`)));
  const title = make("h3", {}, `${total.toLocaleString("en")} held-out problems`);
  const heading = make("div", { className: "heading" }, title, make("div", { className: "key" }, ...keys));
  const note = make("p", { className: "note" }, "A column is a problem: full color where all its completions are right.");
  find("strip").replaceChildren(heading, make("div", { className: "strip" }, sides, picture), note);
}

/** True where an episode is shown as the conversation that it is, not as its raw text. */
const isTalk = (row) => Array.isArray(row.conversation) && !find("raw").checked;

function drawRow(row, values, reach) {
  const fact = (label, value, className = "") => {
    const shown = make("b", { className }, typeof value === "number" ? short(value) : visible(value));
    return make("span", {}, `${visible(label)} `, shown);
  };
  const stop = row.stop_reason ?? { true: "stopped", false: "token limit" }[row.finished];
  const facts = make("div", { className: "facts" }, fact("reward", row.return ?? "–", "reward"),
    typeof row.advantage === "number" ? fact("advantage", row.advantage, row.advantage < 0 ? "below" : "above") : null,
    ...["step", "group", "task", "length"].map((name) => (row[name] == null ? null : fact(name, String(row[name])))),
    stop === undefined ? null : fact("end", stop),
    ...scoreNames(row).map((name) => fact(name, row[name])));
  const card = make("article", { className: "card" }, facts);
  const isPair = find("step").value === PAIRS;
  if (row.prompt) {
    card.append(make("details", { open: isPair }, make("summary", {}, "prompt"), box(visible(row.prompt))));
  }
  const isColored = !isTalk(row) && Array.isArray(row.tokens) && values?.length === row.tokens.length;
  const messages = Array.isArray(row.conversation) ? row.conversation : null;
  const tokens = isColored ? row.tokens : messages?.map((message) => `${message.content}\n`) ?? [row.text ?? ""];
  const isSaid = isColored ? row.drawn?.map((drawn) => !drawn) : messages?.map(({ role }) => role !== "assistant");
  const body = box();
  const length = tokens.reduce((sum, token) => sum + String(token).length, 0);
  showTokens(body, row, tokens, isSaid, values, reach, SHOWN);
  card.append(body);
  if (length > SHOWN) {
    const more = make("button", { type: "button" }, `Show all ${length.toLocaleString("en")} characters`);
    more.onclick = () => {
      showTokens(body, row, tokens, isSaid, values, reach, Infinity);
      more.remove();
      body.focus();
    };
    card.append(more);
  }
  return card;
}

/** A place for text of a model: its direction is its own, and stays within. */
const box = (text = "") => make("pre", { dir: "auto", tabIndex: 0 }, text);

/** Fills a box with tokens or messages; what an environment said is marked. */
function showTokens(body, row, tokens, isSaid, values, reach, limit) {
  const pieces = [];
  for (let i = 0; i < tokens.length && limit > 0; i++) {
    const token = String(tokens[i]);
    const cut = token.length <= limit ? token : token.slice(0, limit).replace(/[\ud800-\udbff]$/, "");
    limit -= token.length;
    pieces.push(make("span", { title: tokens.length > 1 ? describe(row, i) : "" }, visible(cut)));
    if (isTalk(row)) {
      pieces.at(-1).className = isSaid[i] ? "turn" : "turn ours";
      pieces.at(-1).setAttribute("data-role", visible(row.conversation[i].role));
    } else if (isSaid?.[i]) pieces.at(-1).className = "said";
    else pieces.at(-1).style.background = shade(values?.[i], reach);
  }
  body.replaceChildren(...pieces);
}

function describe(row, i) {
  const ratio = logRatios(row)?.[i];
  const facts = { "log-prob": perToken(row, "logprobs")?.[i], ratio: ratio == null ? null : Math.exp(ratio),
    entropy: perToken(row, "entropies")?.[i], advantage: perToken(row, "advantage")?.[i] ?? row.advantage };
  const known = Object.entries(facts).filter(([, value]) => typeof value === "number");
  return known.map(([name, value]) => `${name} ${short(value)}`).join("\n");
}

// Settings, and where a run comes from

function drawOrigins() {
  const origins = runs.map((run) => run.origin);
  const names = [...new Set(origins.flatMap(Object.keys))];
  const heads = runs.length > 1 ? [make("tr", {}, make("th"), ...runs.map((run, r) => make("th", {}, dot(r), visible(run.name))))] : [];
  const rows = names.map((name) => {
    const cells = origins.map((origin) => make("td", {}, originText(name, origin[name])));
    return make("tr", {}, make("th", { scope: "row" }, name === "seconds" ? "total time" : visible(name)), ...cells);
  });
  find("origin").hidden = !names.length;
  find("origin").append(make("table", {}, ...heads, ...rows));
}

function originText(name, value) {
  if (value == null) return name === "end" ? "not yet, or it was killed" : "–";
  if (name !== "seconds") return visible(value);
  const minutes = Math.round(value / 60);
  return value < 600 ? `${Math.round(value)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The settings: those that differ, between runs or from the defaults, and behind them the others. */
function drawSettings() {
  const configs = runs.map((run) => run.config ?? {});
  const several = runs.length > 1;
  const changed = new Set(several ? [] : runs[0].changed);
  const words = find("setting").value.toLowerCase();
  const names = [...new Set(configs.flatMap(Object.keys))].sort().filter((name) => name.toLowerCase().includes(words));
  const valuesOf = (name) => configs.map((config) => (name in config ? JSON.stringify(config[name]) : "–"));
  const differs = (name) => (several ? new Set(valuesOf(name)).size > 1 : changed.has(name));
  const rowOf = (name) => {
    const cells = valuesOf(name).map((value) => make("td", {}, ...visible(value).split(/(?<=,)/)
      .flatMap((part) => [part, make("wbr")])));
    return make("tr", { className: differs(name) ? "differs" : "" }, make("th", { scope: "row" }, visible(name)), ...cells);
  };
  const heads = runs.map((run, i) => make("th", { scope: "col" }, dot(i), visible(run.name)));
  const tableOf = (those) => make("table", {}, ...(several ? [make("tr", {}, make("th"), ...heads)] : []), ...those.map(rowOf));
  const [first, rest] = [true, false].map((isFirst) => names.filter((name) => differs(name) === isFirst));
  const label = several ? "equal in all runs" : "as the defaults are";
  const more = make("details", { open: !first.length || words !== "" },
    make("summary", {}, `${rest.length} ${label}`), tableOf(rest));
  const nothing = words ? "No setting is like that." : "No config.json was written.";
  find("settings").className = `card scroll ${several ? "compare" : ""}`;
  find("settings").replaceChildren(...(names.length ? [tableOf(first), ...(rest.length ? [more] : [])] : [nothing]));
}

const look = document.documentElement.style;
look.colorScheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
find("theme").onclick = () => { look.colorScheme = look.colorScheme === "dark" ? "light" : "dark"; };
new ResizeObserver(() => { // headings that links lead to are not behind the bar
  document.documentElement.style.scrollPaddingTop = `${document.querySelector(".bar").offsetHeight + 12}px`;
}).observe(document.querySelector(".bar"));
find("setting").oninput = drawSettings;
drawHeader();
drawVerdict();
drawOrigins();
drawSettings();
startRollouts();
drawCurves();
