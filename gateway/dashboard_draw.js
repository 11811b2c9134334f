// What every panel is made of: words for numbers, lines, cells, tables. Rows are kept and only changed text is written, so
// that focus, selection and what is folded open survive each second.

const SVG = "http://www.w3.org/2000/svg";
export const find = (id) => document.getElementById(id);

// -- words for numbers ------------------------------------------------------------------------------------------------

export const none = "–";
export const known = (x) => x !== null && x !== undefined;

export function count(x) {
  if (!known(x)) return none;
  if (x >= 9.95e6) return `${(x / 1e6).toFixed(0)}M`;
  if (x >= 1e6) return `${(x / 1e6).toFixed(1)}M`;
  if (x >= 9950) return `${(x / 1e3).toFixed(0)}k`;
  if (x >= 1e3) return `${(x / 1e3).toFixed(1)}k`;
  return String(Math.round(x));
}
export const rate = (x) => (!known(x) ? none : x === 0 ? "0" : x >= 99.95 ? x.toFixed(0) : x >= 9.995 ? x.toFixed(1) : x.toFixed(2));
export const percent = (x, digits = 1) => (!known(x) ? none : x === 1 ? "100 %" : `${(100 * x).toFixed(digits)} %`);
export function seconds(x) {
  if (!known(x)) return none;
  if (x >= 100) return `${x.toFixed(0)} s`;
  if (x >= 1) return `${x.toFixed(2)} s`;
  return `${(1000 * x).toFixed(x < 0.01 ? 1 : 0)} ms`;
}
export function span(s) {
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} days`;
}
export const words = (name) => name.replaceAll("_", " ");

// -- pieces -----------------------------------------------------------------------------------------------------------

export function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function write(at, text) {
  if (at.textContent !== text) at.textContent = text;
}

export function style(at, className) {
  if (at.className !== className) at.className = className;
}

// The drawing of that class in `at`, made the first time: a box that is stretched to its place, and empty shapes.
function drawing(at, className, viewBox, attributes, shapes) {
  const there = at.querySelector(`svg.${className}`);
  if (there) return there;
  const made = (name, given) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(given)) node.setAttribute(key, value);
    return node;
  };
  const svg = made("svg", { class: className, viewBox, preserveAspectRatio: "none", ...attributes });
  svg.append(...shapes.map(([name, given]) => made(name, given)));
  return at.appendChild(svg);
}

// A line of values from zero up; nulls are gaps. `most`: the value of the top, or the largest.
export function spark(at, values, label, most) {
  const ground = { x1: 0, x2: 100, y1: 20, y2: 20 };
  const svg = drawing(at, "spark", "0 0 100 20", { role: "img" }, [["line", ground], ["path", {}]]);
  const top = most ?? Math.max(1e-9, ...values.filter(known));
  const step = 100 / Math.max(59, values.length - 1);
  const from = 100 - step * (values.length - 1);
  let path = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (!known(value)) {
      pen = "M";
      return;
    }
    path += `${pen}${(from + step * i).toFixed(1)} ${(20 - 19 * Math.min(1, value / top)).toFixed(1)}`;
    pen = "L";
  });
  svg.lastChild.setAttribute("d", path);
  svg.setAttribute("aria-label", label);
}

// Fills one cell. `value`: text, or {text, sub, className, bar, barClass, line, most, label, title}.
function cell(td, value) {
  const given = known(value) && typeof value === "object" ? value : { text: value };
  const box = td.firstChild ?? td.appendChild(make("div", "v"));
  const main = box.firstChild ?? box.appendChild(make("span"));
  write(main, given.text ?? "");
  style(main, given.className ?? "");
  if (given.title !== undefined && td.title !== given.title) td.title = given.title;
  let sub = box.querySelector(".sub");
  if (given.sub || sub) {
    if (!sub) main.after((sub = make("span", "sub")));
    write(sub, given.sub ?? "");
    sub.hidden = !given.sub;
  }
  if (known(given.bar)) {
    let bar = box.querySelector(".bar");
    if (!bar) {
      bar = make("span", "bar");
      bar.append(make("i"));
      box.append(bar);
    }
    style(bar, `bar ${given.barClass ?? ""}`.trim());
    bar.firstChild.style.width = `${Math.round(100 * Math.min(1, Math.max(0, given.bar)))}%`;
  }
  if (given.line) spark(box, given.line, given.label ?? "", given.most);
  if (given.interval) interval(box, given.interval);
}

// Brings a table up to date. columns: [label, class, row => value]; rows are known by `key`.
export function table(id, columns, rows, key, empty, more) {
  const at = typeof id === "string" ? find(id) : id;
  if (!at.tHead) {
    const head = at.createTHead().insertRow();
    for (const [label, className] of columns) {
      const th = make("th", className.startsWith("n") ? "n" : "", label);
      th.scope = "col";
      head.append(th);
    }
    at.append(make("tbody"));
  }
  const body = at.tBodies[0];
  const before = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let place = body.firstChild;
  const put = (row) => {
    if (row !== place) body.insertBefore(row, place);
    else place = place.nextSibling;
  };
  for (const item of rows) {
    const name = String(key(item));
    let row = before.get(name);
    if (!row) {
      row = make("tr");
      row.dataset.key = name;
      for (const [label, className] of columns) {
        const td = make("td", className);
        td.dataset.label = label;
        row.append(td);
      }
    }
    before.delete(name);
    columns.forEach(([, , value], i) => cell(row.children[i], value(item)));
    put(row);
    if (more) {
      const detail = more(item, row, before.get(`${name} more`));
      before.delete(`${name} more`);
      if (detail) {
        detail.dataset.key = `${name} more`;
        put(detail);
      }
    }
  }
  if (!rows.length && empty) {
    let row = before.get("");
    before.delete("");
    if (!row) {
      row = make("tr");
      row.dataset.key = "";
      const td = make("td", "empty", empty);
      td.colSpan = columns.length;
      row.append(td);
    }
    put(row);
  }
  for (const row of before.values()) row.remove();
}

export function pairs(at, rows) {
  rows.forEach(([name, value, className], i) => {
    let row = at.children[i];
    if (!row) {
      row = make("div");
      row.append(make("dt"), make("dd"));
      at.append(row);
    }
    write(row.firstChild, name);
    write(row.lastChild, value);
    style(row.lastChild, className ?? "");
  });
  while (at.children.length > rows.length) at.lastChild.remove();
}

export function list(at, rows) {
  rows.forEach(([text, className], i) => {
    const item = at.children[i] ?? at.appendChild(make("li"));
    write(item, text);
    style(item, className ?? "");
  });
  while (at.children.length > rows.length) at.lastChild.remove();
}

// An estimate with its bounds on a scale that is the same for all rows; the middle is zero.
function interval(at, { estimate, low, high, most }) {
  const lines = ["zero", "span", "at"].map((name) => ["line", { class: name }]);
  const svg = drawing(at, "interval", "-100 -6 200 12", { "aria-hidden": "true" }, lines);
  const x = (value) => Math.max(-100, Math.min(100, (100 * value) / most)).toFixed(1);
  const set = (line, x1, x2, y1, y2) =>
    [["x1", x1], ["x2", x2], ["y1", y1], ["y2", y2]].forEach(([n, v]) => line.setAttribute(n, v));
  set(svg.children[0], 0, 0, -6, 6);
  set(svg.children[1], x(low ?? estimate), x(high ?? estimate), 0, 0);
  set(svg.children[2], x(estimate), x(estimate), -4, 4);
}
