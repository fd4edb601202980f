// Fills the page: one chart for each element with data-timeline, of the path that is chosen.

"use strict";

const data = JSON.parse(document.getElementById("timelines").textContent);
const state = {dim: false, found: null, active: null, search: document.getElementById("search")};
const unpacked = new Map();
const charts = [...document.querySelectorAll("[data-timeline]")].map(
  element => Object.assign(new TimelineChart(element, data.words, state), {name: element.dataset.timeline}));
for (const chart of charts) chart.element.chart = chart;
const step_chart = charts.find(chart => chart.name === "step");
const chooser = document.getElementById("path");

function redraw() { for (const chart of charts) if (chart.timeline) chart.draw(); }

function show_path(label) {
  if (!unpacked.has(label)) unpacked.set(label, unpack_timeline(data.timelines[label]));
  const timeline = unpacked.get(label);
  for (const chart of charts) {
    const extent = chart.name === "step" ? [0, timeline.step] : data.timelines[label].windows[chart.name];
    chart.element.closest("figure").hidden = !extent;
    if (extent) chart.show(timeline, ...extent); else chart.timeline = null;
  }
  find_stages();
}

// Kernels whose stage holds what is typed: the others are dimmed, and their number and time are told.
let matches = [], at_match = -1;
function find_stages() {
  const typed = state.search.value.trim().toLowerCase();
  state.found = typed ? kernel => kernel.stage.toLowerCase().includes(typed) : null;
  matches = typed ? step_chart.timeline.kernels.filter(state.found) : [];
  at_match = -1;
  const total = matches.reduce((sum, one) => sum + one.end - one.start, 0);
  const on_path = matches.reduce((sum, one) => sum + one.on_path_ps, 0);
  document.getElementById("found").textContent = !typed ? "" : !matches.length ? "no stage has that in its name" :
    `${matches.length} kernels, ${format_time(total)}, of them ${format_time(on_path)} on the critical path`;
  redraw();
}

function go_to_match(step) {
  if (!matches.length) return;
  at_match = at_match < 0 && step < 0 ? matches.length - 1 : (at_match + step + matches.length) % matches.length;
  const one = matches[at_match], margin = Math.max(one.end - one.start, 1e6) * 1.5;
  step_chart.zoom_to(one.start - margin, one.end + margin);
  step_chart.draw();
  document.getElementById("found").textContent =
    `${at_match + 1} of ${matches.length}: ${step_chart.title(one)}, ${format_time(one.end - one.start)}`;
  step_chart.element.scrollIntoView({block: "nearest"});
}

if (chooser) {
  chooser.addEventListener("change", () => show_path(chooser.value));
  document.getElementById("dim").addEventListener("change", event => {
    state.dim = event.target.checked;
    redraw();
  });
  state.search.addEventListener("input", find_stages);
  state.search.addEventListener("keydown", event => {
    if (event.key === "Enter") go_to_match(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      state.search.value = "";
      find_stages();
      state.search.blur();
    }
  });
  for (const [id, step] of [["previous", -1], ["next", 1]]) {
    document.getElementById(id).addEventListener("click", () => go_to_match(step));
  }
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", () => {
      const chart = button.closest("figure").querySelector("[data-timeline]").chart;
      chart.pointer = null;
      KEYS[button.dataset.do](chart);
    });
  }
  state.active = step_chart;
  listen_to_keys(state);
  show_path(chooser.value);
}
document.body.dataset.errors = errors;
document.body.dataset.drawn = "yes";
