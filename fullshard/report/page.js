"use strict";
(() => {
  const tip = document.getElementById("tip");
  // Plain text only: names in it come from the data of the run.
  const tooltip = (handler, event, item, value) => {
    tip.hidden = value == null || value === "";
    if (tip.hidden) return;
    // A title of one letter is a field's name: its value is shown alone. Vega-Lite does not find text of the point
    // nearest to the pointer, so text comes from the row itself.
    const row = item.datum.datum ?? item.datum;
    const line = ([name, text]) => (name.length > 1 ? `${name} ${text}` : typeof row[name] === "string" ? row[name] : text);
    showTip(typeof value === "object" ? Object.entries(value).map(line).join("\n") : String(value), event.clientX, event.clientY);
  };
  const showTip = (text, x, y) => {
    tip.hidden = false;
    tip.textContent = text;
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = (y + 16 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 8 : y + 16) + "px";
  };
  const options = {
    mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, hover: false, tooltip,
  };
  // What the reader has chosen for all curves: how much of each smoothed value comes from those before it, and the axis.
  const chosen = { smoothing: 0, log: false };
  const rows = ({ columns, names, smooths }) => {
    const keys = Object.keys(columns), sums = {}, weights = {}, weight = smooths ? chosen.smoothing : 0;
    return columns[keys[0]].map((_, i) => {
      const row = Object.fromEntries(keys.map((key) => [key, columns[key][i]])), { s } = row, value = row.a ?? row.y;
      if (!weight || row.y == null) return { ...row, n: names[s] };
      // An exponential mean: the weights of all values so far, which become 1, count for the first ones.
      sums[s] = weight * (sums[s] ?? 0) + (1 - weight) * value;
      weights[s] = weight * (weights[s] ?? 0) + (1 - weight);
      return { ...row, n: names[s], m: sums[s] / weights[s] };
    });
  };
  const spec = (chart) => {
    let { encoding, layer } = chart.spec;
    if (chart.log && chosen.log) encoding = { ...encoding, y: { ...encoding.y, scale: { type: "log" } } };
    if (chart.smooths && chosen.smoothing) {
      const [line, ...rest] = layer, faint = { ...line, mark: { ...line.mark, opacity: 0.3 } };
      const smooth = { ...line, mark: { ...line.mark, strokeWidth: 2.4 }, encoding: { ...line.encoding, y: { ...encoding.y, field: "m" } } };
      layer = [faint, smooth, ...rest];
    }
    return { ...chart.spec, ...(encoding && { encoding }), ...(layer && { layer }) };
  };
  const views = {}, specs = {};
  // The controls are of use where charts are drawn; new ones of a live page show what was chosen.
  const offer = () => {
    for (const one of document.querySelectorAll(".controls")) one.hidden = typeof vegaEmbed === "undefined";
    for (const [choice, value] of Object.entries(chosen)) {
      for (const one of document.querySelectorAll(`[data-choice="${choice}"]`)) {
        one[one.type === "range" ? "valueAsNumber" : "checked"] = value;
      }
    }
  };
  // Draws charts, given by id. Where only the data of one has changed, it stays as it is and gets the new data.
  let drawing = Promise.resolve();
  const draw = (charts) => (drawing = drawing.then(() => drawAll(charts)));
  const drawAll = async (charts) => {
    for (const [id, chart] of Object.entries(charts)) {
      const place = document.querySelector(`[data-chart="${CSS.escape(id)}"]`);
      if (!place || typeof vegaEmbed === "undefined") continue;
      const wanted = JSON.stringify(spec(chart)), known = place.dataset.drawn && specs[id] === wanted;
      specs[id] = wanted;
      if (known) {
        await views[id].view.data("values", rows(chart)).runAsync();
        continue;
      }
      place.style.minHeight = place.offsetHeight + "px"; // nothing below it moves while it is drawn again
      views[id]?.finalize();
      views[id] = await vegaEmbed(place, { ...spec(chart), data: { name: "values", values: rows(chart) } }, options);
      place.style.minHeight = "";
      place.dataset.drawn = "true";
      place.tabIndex = 0;
    }
    offer();
    document.body.dataset.drawn = "true";
  };
  // Arrow keys read a chart, one place on its axis after the other.
  const read = (place, key) => {
    const { view } = views[place.dataset.chart], data = view.data("values"), bars = "b" in data[0];
    const stops = [...new Set(data.map((one) => (bars ? one.b : one.x)))], last = stops.length - 1;
    if (!bars) stops.sort((a, b) => a - b);
    const before = Number(place.dataset.at ?? (/Left|Up/.test(key) ? last + 1 : -1));
    const next = key === "Home" ? 0 : key === "End" ? last : before + (/Left|Up/.test(key) ? -1 : 1);
    const at = Math.max(0, Math.min(last, next)), stop = stops[at];
    place.dataset.at = at;
    const number = (value) => (value == null ? "not finite" : Number(value.toPrecision(6)));
    const there = data.filter((one) => (bars ? one.b : one.x) === stop);
    const lines = there.map((one) => `${one.n}: ${number(one.y)}`);
    const box = place.getBoundingClientRect(), upright = !bars || view.scale("x").bandwidth;
    const along = view.scale(upright ? "x" : "y")(stop) + view.origin()[upright ? 0 : 1];
    const spot = upright ? [box.left + along, box.top] : [box.left, box.top + along];
    showTip([there[0].l ?? (bars ? stop : number(stop)), ...new Set(lines)].join("\n"), ...spot);
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hidden = true;
    const known = /^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key) && event.target.dataset?.drawn;
    if (!known) return;
    event.preventDefault();
    read(event.target, event.key);
  });
  document.addEventListener("focusout", () => { tip.hidden = true; });
  const json = (id) => JSON.parse(document.getElementById(id).textContent);
  window.fullshard = { draw, json, views };
  draw(json("charts"));
  // The controls of all parts of the page choose the same. Between two drawings only the last choice counts.
  let waiting = false;
  document.addEventListener("input", ({ target }) => {
    const { choice } = target.dataset ?? {}, property = target.type === "range" ? "valueAsNumber" : "checked";
    if (!choice) return;
    chosen[choice] = target[property];
    for (const one of document.querySelectorAll(`[data-choice="${choice}"]`)) one[property] = chosen[choice];
    if (waiting) return;
    waiting = true;
    drawing.then(() => { waiting = false; return draw(json("charts")); });
  });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  for (const button of document.querySelectorAll("button[data-csv]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const columns = json(button.dataset.csv), names = Object.keys(columns);
      const cell = (value) => (value == null ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
      const lines = columns[names[0]].map((_, i) => names.map((name) => cell(columns[name][i])).join(","));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([[names.map(cell).join(","), ...lines].join("\n")], { type: "text/csv" }));
      link.download = button.dataset.csv + ".csv";
      link.click();
      URL.revokeObjectURL(link.href);
    });
  }
  // Printed pages have no closed parts.
  addEventListener("beforeprint", () => document.querySelectorAll("details[data-print]").forEach((one) => { one.open = true; }));
})();
