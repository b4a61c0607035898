"use strict";
(() => {
  const tip = document.getElementById("tip");
  // Plain text only: names in it come from the data of the run.
  const tooltip = (handler, event, item, value) => {
    tip.hidden = value == null || value === "";
    if (tip.hidden) return;
    const box = typeof value === "object" ? Object.values(value).join("\n") : String(value);
    tip.textContent = box;
    const { clientX: x, clientY: y } = event;
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
  const views = {};
  // Draws charts, given by id; again with new data.
  const draw = async (charts) => {
    for (const [id, chart] of Object.entries(charts)) {
      const place = document.querySelector(`[data-chart="${CSS.escape(id)}"]`);
      if (!place || typeof vegaEmbed === "undefined") continue;
      const spec = { ...chart.spec, data: { name: "values", values: rows(chart) } };
      views[id]?.finalize();
      views[id] = await vegaEmbed(place, spec, options);
      place.dataset.drawn = "true";
    }
    document.body.dataset.drawn = "true";
  };
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
