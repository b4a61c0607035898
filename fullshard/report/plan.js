"use strict";
// The rows of the picture: what they are in full, by pointer and by keyboard. Up and down move from row to row.
(() => {
  const tip = document.getElementById("tip");
  const rows = [...document.querySelectorAll(".plan g[tabindex]")];
  const show = (row, x, y) => {
    tip.textContent = row.getAttribute("aria-label");
    tip.hidden = false;
    tip.style.left = Math.max(4, Math.min(x, innerWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = (y + tip.offsetHeight > innerHeight ? Math.max(4, y - tip.offsetHeight - 40) : y) + "px";
  };
  const hide = () => { tip.hidden = true; };
  rows.forEach((row, i) => {
    const title = row.querySelector("title");
    row.setAttribute("aria-label", title.textContent); // instead of the browser's own, slower tooltip
    row.setAttribute("role", "group");
    row.setAttribute("tabindex", i ? "-1" : "0");
    title.remove();
    row.addEventListener("pointermove", (event) => show(row, event.clientX + 14, event.clientY + 18));
    row.addEventListener("pointerleave", hide);
    row.addEventListener("focus", () => {
      const box = row.getBoundingClientRect();
      show(row, Math.max(box.left, 0) + 24, box.bottom + 6);
    });
    row.addEventListener("blur", hide);
    row.addEventListener("keydown", (event) => {
      const next = { ArrowDown: i + 1, ArrowUp: i - 1, Home: 0, End: rows.length - 1 }[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined || !rows[next]) return;
      event.preventDefault();
      row.setAttribute("tabindex", "-1");
      rows[next].setAttribute("tabindex", "0");
      rows[next].focus();
    });
  });
})();
