"use strict";
// Keeps a served page up to date. Only what differs is touched: scroll positions, open parts, focus and charts stay.
(() => {
  const SECONDS = 1, PATIENT = 5, MISSES = 3;
  const own = (node) => node.nodeName === "SCRIPT" && !node.type; // this script and its like
  const charts = () => fullshard.draw(fullshard.json("charts"));

  const attributes = (old, fresh) => {
    const kept = old.nodeName === "DETAILS" ? ["open"] : old.nodeName === "BUTTON" ? ["hidden"] : ["data-drawn", "data-at", "tabindex", "style"];
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !kept.includes(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value && !kept.includes(name)) old.setAttribute(name, value);
    }
  };
  const morph = (old, fresh) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
    } else if (old.id !== "tip" && !old.isEqualNode(fresh)) {
      attributes(old, fresh);
      if (!old.matches("[data-chart]")) children(old, fresh);
    }
  };
  const children = (old, fresh) => {
    const named = new Map([...old.children].filter((one) => one.id).map((one) => [one.id, one]));
    const alike = (one, node) => one?.nodeName === node.nodeName && !one.id && !own(one);
    let at = old.firstChild;
    for (const node of [...fresh.childNodes]) {
      const match = node.id ? named.get(node.id) : alike(at, node) ? at : null;
      if (!match) {
        old.insertBefore(document.importNode(node, true), at);
        continue;
      }
      if (match !== at) old.insertBefore(match, at);
      morph(match, node);
      at = match.nextSibling;
    }
    while (at) {
      const next = at.nextSibling;
      if (!own(at)) at.remove();
      at = next;
    }
  };

  let tag = "", misses = 0;
  const say = (text) => {
    const place = document.querySelector("#live [role=status]");
    if (place && place.textContent !== text) place.textContent = text;
  };
  const ask = async () => {
    try {
      const answer = await fetch("update", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        const before = document.getElementById("charts").textContent;
        children(document.body, fresh.body);
        tag = answer.headers.get("ETag");
        if (document.getElementById("charts").textContent !== before) await charts();
      }
      misses = 0;
      if (answer.status >= 400) {
        tag = "";
        say("The run's folder cannot be read.");
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // fetch raises this one if nobody answers
      misses += 1;
      tag = ""; // what is written here now is replaced when somebody answers again
      if (misses >= MISSES) say("Not connected: fullshard report --serve has ended, or the connection is lost.");
    }
    const over = document.querySelector("#live")?.dataset.state === "over";
    if (!over) setTimeout(ask, 1000 * (misses < MISSES ? SECONDS : PATIENT));
  };
  ask();
})();
