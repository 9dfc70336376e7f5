// The workbench without reloads: links and forms fetch the part anew, the address follows; a rectangle in the
// front, or a stretch of an axis, becomes terms of the filter. Without this script everything reloads the page.
"use strict";
(() => {
  const part = document.querySelector("[data-bench]");
  if (!part) return;
  const status = document.querySelector("[data-bench-state]");
  let newest = 0;
  const show = async (address, keep) => {
    const turn = ++newest;
    const held = document.activeElement && part.contains(document.activeElement) ? document.activeElement : null;
    const again = held && (held.name ? `[name="${held.name}"]` : held.matches("thead a") ? `thead th:nth-child(${held.closest("th").cellIndex + 1}) a` : "");
    const left = part.querySelector(".wide.bench")?.scrollLeft || 0;
    const open = part.querySelector("details.columns")?.open;
    part.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(address, { headers: { "X-Live": "1" }, cache: "no-store", redirect: "error" });
      if (answer.status === 401) { status.textContent = "Your token is no longer valid: load the page again to log in."; return; }
      const text = await answer.text();
      if (turn !== newest) return;
      if (answer.status !== 200) {
        const page = new DOMParser().parseFromString(text, "text/html");
        status.textContent = page.querySelector("[role=alert]")?.textContent || "The service cannot answer just now.";
        return;
      }
      status.textContent = "";
      part.innerHTML = text;
      if (!keep) history.pushState({}, "", address);
      part.querySelector(".wide.bench").scrollLeft = left;
      if (open) part.querySelector("details.columns").open = true;
      if (again) part.querySelector(again)?.focus({ preventScroll: true });
      globalThis.liveMarks(part);
      ready();
    } catch { status.textContent = "The service does not answer; try again."; }
    finally { part.removeAttribute("aria-busy"); }
  };
  const address = (change) => {
    const query = new URLSearchParams(location.search);
    query.delete("page");
    change(query);
    return `${location.pathname}?${query}`;
  };
  const picks = () => [...part.querySelectorAll('#picks input[name=trial], input[form=picks]:checked')].map((e) => e.value);
  const count = () => {
    const button = part.querySelector("[data-compare]");
    const many = picks().length;
    button.disabled = many < 2 || many > 5;
  };
  const range = (names) => show(address((query) => {
    const mine = Object.keys(names);
    const rest = (query.get("where") || "").split(/\s+/).filter((t) => t && !mine.some((n) => t.startsWith(`${n}<=`) || t.startsWith(`${n}>=`)));
    const text = (v) => Number(v.toPrecision(6)).toString();
    for (const name of mine) rest.push(`${name}>=${text(names[name][0])}`, `${name}<=${text(names[name][1])}`);
    query.set("where", rest.join(" "));
  }));
  const value = (share, low, high, log) => (log ? low * (high / low) ** share : low + share * (high - low));
  const spot = (svg, event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    return [point.x, point.y];
  };
  const drag = (svg, from, event, move, done) => {
    event.preventDefault();
    svg.setPointerCapture(event.pointerId);
    const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    box.setAttribute("class", "brush");
    svg.append(box);
    let last = from;
    const go = (e) => {
      last = spot(svg, e);
      const [x, y, w, h] = move(from, last);
      for (const [k, v] of Object.entries({ x, y, width: w, height: h })) box.setAttribute(k, v);
    };
    svg.addEventListener("pointermove", go);
    svg.addEventListener("pointerup", () => {
      svg.removeEventListener("pointermove", go);
      box.remove();
      done(from, last);
    }, { once: true });
  };
  const ready = () => {
    for (const svg of part.querySelectorAll("svg[data-brush]")) {
      const d = svg.dataset;
      const share = (x, y) => [(x - d.left) / (d.right - d.left), (d.bottom - y) / (d.bottom - d.top)].map((v) => Math.min(1, Math.max(0, v)));
      svg.addEventListener("pointerdown", (event) => {
        if (event.button || event.target.closest("a")) return;
        drag(svg, spot(svg, event), event,
          ([ax, ay], [bx, by]) => [Math.min(ax, bx), Math.min(ay, by), Math.abs(bx - ax), Math.abs(by - ay)],
          (a, b) => {
            if (Math.abs(a[0] - b[0]) < 5 || Math.abs(a[1] - b[1]) < 5) return;
            const [s, e] = [share(...a), share(...b)];
            const at = (i, name) => [s[i], e[i]].sort((p, q) => p - q).map((v) => value(v, +d[`${name}low`], +d[`${name}high`], d[`${name}log`] === "1"));
            range({ [d.x]: at(0, "x"), [d.y]: at(1, "y") });
          });
      });
    }
    for (const axis of part.querySelectorAll("rect.axis[data-low]")) {
      axis.addEventListener("pointerdown", (event) => {
        const svg = axis.ownerSVGElement, d = axis.dataset;
        const [x, y, w, h] = ["x", "y", "width", "height"].map((n) => +axis.getAttribute(n));
        drag(svg, spot(svg, event), event,
          ([, ay], [, by]) => [x, Math.min(ay, by), w, Math.abs(by - ay)],
          (a, b) => {
            if (Math.abs(a[1] - b[1]) < 5) return;
            const at = [a[1], b[1]].map((v) => Math.min(1, Math.max(0, (y + h - v) / h))).sort((p, q) => p - q);
            range({ [d.axis]: at.map((v) => value(v, +d.low, +d.high, d.log === "1")) });
          });
      });
    }
    count();
  };
  part.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-bench-link]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const query = new URLSearchParams(link.search);
    query.delete("pick");
    for (const n of picks()) query.append("pick", n);
    show(`${link.pathname}?${query}`);
  });
  const submit = (form) => {
    const query = new URLSearchParams();
    for (const [name, text] of new FormData(form)) if (text) query.append(name, text);
    for (const n of picks()) query.append("pick", n);
    show(`${location.pathname}?${query}`);
  };
  part.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-bench-form]")) return;
    event.preventDefault();
    submit(event.target);
  });
  part.addEventListener("change", (event) => {
    if (event.target.matches("input[form=picks]")) {
      const query = new URLSearchParams(location.search);
      query.delete("pick");
      for (const n of picks()) query.append("pick", n);
      history.replaceState({}, "", `${location.pathname}?${query}`);
      count();
    } else if (event.target.closest("[data-bench-form]")) submit(event.target.form);
  });
  addEventListener("popstate", () => show(location.href, true));
  ready();
})();
