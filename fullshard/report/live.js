"use strict";
// Keeps a served page up to date. Only what differs is touched: scroll positions, open parts, focus and charts stay.
(() => {
  const MISSES = 3, PATIENT = 5; // after so many questions without an answer, it asks so much less often
  const own = (node) => node.nodeName === "SCRIPT" && !node.type; // this script and its like
  const charts = () => fullshard.draw(fullshard.json("charts"));

  const attributes = (old, fresh) => {
    const kept = ["open", "hidden", "data-drawn", "data-at", "tabindex", "style"]; // what the reader or a script has set
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

  const say = (text) => {
    const place = document.querySelector("#live [role=status]");
    if (place.textContent !== text) place.textContent = text;
  };
  const show = async (text) => {
    const before = document.getElementById("charts").textContent;
    children(document.body, new DOMParser().parseFromString(text, "text/html").body);
    if (document.getElementById("charts").textContent !== before) await charts();
  };

  let tag = "", misses = 0;
  const question = async () => {
    const answer = await fetch("update" + location.search, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    return { status: answer.status, tag: answer.headers.get("ETag"), text: await answer.text() };
  };
  const ask = async () => {
    const answer = await question().catch(() => null); // nobody answers, or not to the end
    misses = answer ? 0 : misses + 1;
    if (answer?.status === 200) await show(answer.text);
    else if (answer?.status !== 304) {
      if (answer?.status === 403) say("This is the address of an earlier server: open the one that fullshard report --serve has printed.");
      else if (answer) say("The run's folder cannot be read.");
      else if (misses >= MISSES) say("Not connected: fullshard report --serve has ended, or the connection is lost.");
    }
    // What was written here instead is replaced by the next answer.
    tag = answer?.status === 200 ? answer.tag : answer?.status === 304 ? tag : "";
    const { state, every } = document.getElementById("live").dataset;
    if (state !== "over") setTimeout(ask, 1000 * every * (misses < MISSES ? 1 : PATIENT));
  };
  ask();
})();
