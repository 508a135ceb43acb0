// The table of requests: filters, sorting, and a drawing of a request's cycles. Text from records is only ever set as
// text, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("records").textContent);
  const place = Object.fromEntries(data.columns.map(([key], n) => [key, n]));
  const form = document.getElementById("filters");
  const table = document.getElementById("explorer");
  const choices = ["paper", "platform", "run", "method", "workload"];
  const searched = data.rows.map((row) => row.filter((cell) => typeof cell === "string").join(" ").toLowerCase());
  let sort = { key: "", down: false };
  let opened = new Set();

  const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  const draw = (name, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function show(value, kind) {
    if (value === null) return "-";
    if (kind === "num") return value.toFixed(2);
    if (kind === "mb") return (value / 1e6).toFixed(1);
    if (kind === "share") return (100 * value).toFixed(1) + "%";
    return String(value);
  }
  const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);

  // --- the table ---

  function compare(one, other) {
    const [a, b] = [data.rows[one][place[sort.key]], data.rows[other][place[sort.key]]];
    if (a === null || b === null) return (a === null) - (b === null) || one - other; // missing values last, both ways
    const order = typeof a === "string" ? (a < b ? -1 : a > b ? 1 : 0) : a - b;
    return (sort.down ? -order : order) || one - other;
  }

  function chosen() {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = choices.map((name) => [place[name], form.elements[name].value]).filter(([, value]) => value);
    const rows = data.rows.map((_, n) => n).filter((n) =>
      wanted.every(([column, value]) => data.rows[n][column] === value) && words.every((word) => searched[n].includes(word)));
    return sort.key ? rows.sort(compare) : rows;
  }

  function header() {
    const cells = data.columns.map(([key, label, kind]) => {
      const state = sort.key !== key ? "none" : sort.down ? "descending" : "ascending";
      const mark = { none: "", ascending: " \u25b2", descending: " \u25bc" }[state];
      const button = make("button", { type: "button" }, label + mark);
      button.addEventListener("click", () => {
        sort = sort.key === key ? { key, down: !sort.down } : { key, down: kind !== "text" };
        update();
        table.tHead.querySelectorAll("button")[place[key]].focus();
      });
      return make("th", { scope: "col", "aria-sort": state, class: kind === "text" ? "" : "num" }, button);
    });
    table.tHead.replaceChildren(make("tr", {}, ...cells));
  }

  function line(n) {
    const open = opened.has(n);
    const button = make("button", { type: "button", "aria-expanded": open, id: "row-" + n });
    if (open) button.setAttribute("aria-controls", "cycles-" + n);
    button.append((open ? "\u25be " : "\u25b8 ") + data.rows[n][0]);
    button.addEventListener("click", () => {
      if (!opened.delete(n)) opened.add(n);
      update();
      document.getElementById("row-" + n).focus();
    });
    const cells = data.columns.map(([key, , kind], column) => {
      const value = data.rows[n][column];
      if (column === 0) return make("td", {}, button);
      if (key === "tag") return make("td", {}, make("span", { class: "tag tag-" + value.replace(/[^a-z]/g, "") }, value));
      return make("td", { class: kind === "text" ? "" : "num" }, show(value, kind));
    });
    return make("tr", { "data-row": n }, ...cells);
  }

  function update() {
    const rows = chosen();
    header();
    table.tBodies[0].replaceChildren(...rows.flatMap((n) => opened.has(n) ? [line(n), detail(n)] : [line(n)]));
    document.getElementById("count").textContent = data.rows.length ? `${rows.length} of ${data.rows.length} requests` : "No requests are recorded.";
    const state = new URLSearchParams();
    for (const name of ["text", ...choices]) if (form.elements[name].value) state.set(name, form.elements[name].value);
    if (sort.key) state.set("sort", (sort.down ? "-" : "") + sort.key);
    if (opened.size) state.set("open", [...opened].join("."));
    const hash = state.toString();
    if (hash || location.hash.includes("=")) history.replaceState(null, "", hash ? "#" + hash : location.pathname + location.search);
  }

  function restore() {
    if (!location.hash.includes("=")) return false; // a link to a section
    const state = new URLSearchParams(location.hash.slice(1));
    form.elements.text.value = state.get("text") || "";
    for (const name of choices) {
      const value = state.get(name) || "";
      form.elements[name].value = [...form.elements[name].options].some((option) => option.value === value) ? value : "";
    }
    const key = (state.get("sort") || "").replace(/^-/, "");
    sort = { key: key in place ? key : "", down: (state.get("sort") || "").startsWith("-") };
    opened = new Set((state.get("open") || "").split(".").filter((part) => /^\d+$/.test(part) && +part < data.rows.length).map(Number));
    return true;
  }

  // --- a request's cycles ---

  const parts = [
    ["draft", "drafting"], ["draft-wait", "drafting, waiting for experts"], ["predict", "predicting experts"],
    ["verify", "verifying"], ["verify-wait", "verifying, waiting for experts"], ["rest", "rest"],
  ];

  function cycle(values) {
    const of = Object.fromEntries(data.cycle_columns.map(([key], n) => [key, values[n]]));
    const waits = [of.draft_wait_ms || 0, of.verify_wait_ms || 0];
    const rest = of.cycle_ms - of.draft_ms - (of.predict_ms || 0) - of.verify_ms;
    of.parts = [of.draft_ms - waits[0], waits[0], of.predict_ms || 0, of.verify_ms - waits[1], waits[1], rest];
    return of;
  }

  function swatch(kind, label) {
    const shape = kind === "emitted" ? draw("circle", { cx: 6, cy: 6, r: 4, class: "fill-emitted" })
      : draw("rect", { x: 1, y: 1, width: 10, height: 10, class: "fill-" + kind });
    return make("li", {}, draw("svg", { class: "swatch", width: 12, height: 12, "aria-hidden": "true" }, shape), label);
  }

  function timeline(cycles, label) {
    const step = Math.max(16, Math.min(44, Math.floor(640 / cycles.length)));
    const [left, bar, width] = [52, step - 6, 52 + step * cycles.length + 8];
    const picture = draw("svg", { class: "timeline", width, height: 372, viewBox: `0 0 ${width} 372`, role: "img", "aria-label": label });
    const panel = (title, top, height, most) => {
      const scale = (value) => (most ? (height * value) / most : 0);
      picture.append(
        draw("text", { x: 4, y: top - 8 }, title),
        draw("text", { x: left - 6, y: top + 8, "text-anchor": "end" }, most >= 100 ? most.toFixed(0) : String(+most.toFixed(1))),
        draw("text", { x: left - 6, y: top + height, "text-anchor": "end" }, "0"),
        draw("line", { x1: left, x2: width - 4, y1: top + height, y2: top + height, class: "axis" }));
      const rect = (n, from, value, kind) => {
        if (value > 0) picture.append(draw("rect", {
          x: left + n * step + 3, y: (top + height - scale(from + value)).toFixed(1), width: bar, height: scale(value).toFixed(1),
          class: "fill-" + kind }));
      };
      return { rect, at: (value) => top + height - scale(value) };
    };
    const most = (values) => Math.max(0, ...values);
    const tokens = panel("tokens", 24, 70, most(cycles.map((c) => Math.max(c.drafted, c.emitted))));
    const times = panel("ms", 134, 100, most(cycles.map((c) => c.cycle_ms)));
    const experts = panel("experts", 272, 70, most(cycles.map((c) => Math.max(c.unique_verify || 0, sum([c.missed, c.prefetched])))));
    const every = Math.ceil(24 / step);
    cycles.forEach((c, n) => {
      tokens.rect(n, 0, c.accepted, "draft");
      tokens.rect(n, 0, c.drafted, "outline");
      picture.append(draw("circle", { cx: left + n * step + 3 + bar / 2, cy: tokens.at(c.emitted), r: 4, class: "fill-emitted" }));
      c.parts.forEach((value, part) => times.rect(n, sum(c.parts.slice(0, part)), value, parts[part][0]));
      experts.rect(n, 0, c.missed, "verify");
      experts.rect(n, c.missed || 0, c.prefetched, "draft");
      experts.rect(n, 0, c.unique_verify, "outline");
      if (n % every === 0) picture.append(draw("text", { x: left + n * step + 3 + bar / 2, y: 360, "text-anchor": "middle" }, n + 1));
      const words = data.cycle_columns.map(([key, name, kind]) => `${name}: ${show(c[key], kind)}`).join("\n");
      picture.append(draw("rect", { x: left + n * step, y: 16, width: step, height: 330, class: "fill-hit" },
        draw("title", {}, `cycle ${n + 1}\n${words}`)));
    });
    return picture;
  }

  function detail(n) {
    const row = data.rows[n];
    const at = (key) => row[place[key]];
    const cycles = data.cycles[n].map(cycle);
    const where = [at("paper"), at("platform"), at("run")].filter(Boolean).join(", ");
    const [ms, stalled] = [sum(cycles.map((c) => c.cycle_ms)), sum(cycles.map((c) => c.stall_ms))];
    const label = `${at("method")}, ${at("request")} (${where}): ${at("tokens")} tokens in ${cycles.length} cycles, ` +
      `${ms.toFixed(0)} ms, ${stalled.toFixed(0)} ms of them stalled, ${(sum(cycles.map((c) => c.read_bytes)) / 1e6).toFixed(1)} MB read`;
    const legends = [["tokens", [["outline", "drafted"], ["draft", "accepted"], ["emitted", "emitted"]]], ["ms", parts],
      ["experts", [["outline", "touched by verification"], ["verify", "loaded on demand"], ["draft", "prefetched"]]]];
    const legend = legends.map(([name, kinds]) =>
      make("ul", { class: "legend" }, make("li", {}, name + ":"), ...kinds.map(([kind, words]) => swatch(kind, words))));
    const head = make("tr", {}, make("th", { scope: "col" }, "cycle"),
      ...data.cycle_columns.map(([, name]) => make("th", { scope: "col", class: "num" }, name)));
    const lines = data.cycles[n].map((values, number) => make("tr", {}, make("td", {}, number + 1),
      ...values.map((value, column) => make("td", { class: "num" }, show(value, data.cycle_columns[column][2])))));
    const body = make("div", { class: "detail-body", id: "cycles-" + n }, make("p", {}, label + "."), ...legend,
      make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Cycles, drawn" }, timeline(cycles, label)),
      make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Cycles, in numbers" },
        make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines))));
    return make("tr", { class: "detail" }, make("td", { colspan: data.columns.length }, body));
  }

  // --- start ---

  for (const name of choices) {
    const values = [...new Set(data.rows.map((row) => row[place[name]]))].filter(Boolean).sort();
    form.elements[name].append(make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, value)));
  }
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    [sort, opened] = [{ key: "", down: false }, new Set()];
    setTimeout(update); // after the fields are empty
  });
  window.addEventListener("hashchange", () => restore() && update());
  const linked = restore();
  update();
  if (linked) document.getElementById("requests").scrollIntoView();
})();
