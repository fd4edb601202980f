// Pages of compared cases: charts in the colours of the page, tables that sort by a column and filter by what is typed.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);

// Charts have no ground of their own, and their text and lines follow the page, in light and in dark.
function themed(layout) {
  const ink = getComputedStyle(document.body).color;
  const faint = ink.replace("rgb(", "rgba(").replace(")", ", 0.16)");
  const axes = Object.fromEntries(Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name)).map(
    ([name, axis]) => [name, {...axis, gridcolor: faint, zerolinecolor: ink, linecolor: faint}]));
  return {...layout, ...axes, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {...layout.font, color: ink}};
}

function draw_all() {
  return Promise.all(Object.entries(figures).map(([name, figure]) => Plotly.react(
    document.getElementById(name), figure.data, themed(figure.layout), {responsive: true, displaylogo: false, displayModeBar: false})));
}

// "1,234 us", "+3.4 %" and "-1.2e-3" are numbers; "12 to 14" counts as its first one. An empty cell comes last.
function sort_key(cell) {
  const text = cell.textContent.trim();
  const found = text.replace(/,/g, "").match(/^[+\-−]?\d+(\.\d+)?(e[+\-]?\d+)?/i);
  return {text, number: found ? Number(found[0].replace("−", "-")) : NaN};
}

function sort_table(table, column, ascending) {
  const rows = [...table.tBodies[0].rows].map(row => ({row, key: sort_key(row.cells[column])}));
  const filled = rows.filter(one => one.key.text);
  const numeric = filled.every(one => !Number.isNaN(one.key.number));
  const by_error = table.tHead.rows[0].cells[column].dataset.sort === "size";  // -30 % is worse than +5 %
  const number = one => by_error ? Math.abs(one.key.number) : one.key.number;
  filled.sort((one, other) => (ascending ? 1 : -1) * (numeric
    ? number(one) - number(other)
    : one.key.text.localeCompare(other.key.text, "en", {numeric: true})));
  table.tBodies[0].append(...filled.map(one => one.row), ...rows.filter(one => !one.key.text).map(one => one.row));
  for (const head of table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
}

function filter_table(table, typed, count) {
  const words = typed.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    shown += !row.hidden;
  }
  count.textContent = words.length ? `${shown} of ${table.tBodies[0].rows.length}` : "";
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => head.querySelector("button").addEventListener(
    "click", () => sort_table(table, column, head.getAttribute("aria-sort") !== "ascending")));
}
for (const input of document.querySelectorAll("input[data-filters]")) {
  const count = input.parentElement.querySelector("output");
  input.addEventListener("input", () => filter_table(document.getElementById(input.dataset.filters), input.value, count));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw_all);
draw_all().then(() => {
  document.body.dataset.errors = errors;
  document.body.dataset.drawn = "yes";
});
