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
  const rows = ({ columns, names }) => {
    const keys = Object.keys(columns);
    return columns[keys[0]].map((_, i) => {
      const row = Object.fromEntries(keys.map((key) => [key, columns[key][i]]));
      return { ...row, n: names[row.s] };
    });
  };
  const views = {}, specs = {};
  // Draws charts, given by id. Where only the data of one has changed, it stays as it is and gets the new data.
  let drawing = Promise.resolve();
  const draw = (charts) => (drawing = drawing.then(() => drawAll(charts)));
  const drawAll = async (charts) => {
    for (const [id, chart] of Object.entries(charts)) {
      const place = document.querySelector(`[data-chart="${CSS.escape(id)}"]`);
      if (!place || typeof vegaEmbed === "undefined") continue;
      const spec = { ...chart.spec, data: { name: "values", values: rows(chart) } };
      const known = place.dataset.drawn && specs[id] === JSON.stringify(chart.spec);
      specs[id] = JSON.stringify(chart.spec);
      if (known) {
        await views[id].view.data("values", spec.data.values).runAsync();
        continue;
      }
      place.style.minHeight = place.offsetHeight + "px"; // nothing below it moves while it is drawn again
      views[id]?.finalize();
      views[id] = await vegaEmbed(place, spec, options);
      place.style.minHeight = "";
      place.dataset.drawn = "true";
      place.tabIndex = 0;
    }
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
