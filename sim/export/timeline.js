// A timeline that zooms: layers, critical path, kernels by stream with their phases, and rates, in one SVG.
//
// A chart library draws bars at fixed places with a name each. Here names move into the part of a bar that is in view,
// rates are binned anew, and what is below a pixel is gathered, at every zoom. `timeline_data.py` says what `data` holds.

"use strict";

const PS_PER_US = 1e6;
const MIN_WINDOW_PS = 20000; // 20 ns across the chart
const ROW = {layers: 18, path: 18, kernel: 20, phase: 15, between: 9, rate: 64, rate_gap: 16, axis: 34};
const LABEL_PX = 96; // left of the plot, for the names of rows; less in a narrow window
const PADDING_PX = 3; // between a name and the ends of its bar
const NAME_FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

const measure = document.createElement("canvas").getContext("2d");
const widths = new Map();
function text_width(text) {
  if (!widths.has(text)) {
    measure.font = NAME_FONT;
    widths.set(text, measure.measureText(text).width);
  }
  return widths.get(text);
}

function escape_text(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
}

function running_sum(differences) {
  let total = 0;
  return differences.map(one => (total += one));
}

// The first position whose value is above `limit`, in an ascending list.
function first_above(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function format_time(ps) {
  const us = Math.abs(ps) / PS_PER_US;
  const sign = ps < 0 ? "−" : "";
  if (us >= 10000) return sign + (us / 1000).toFixed(2) + " ms";
  if (us >= 100) return sign + us.toFixed(1) + " µs";
  if (us >= 1) return sign + us.toFixed(2) + " µs";
  return sign + (us * 1000).toFixed(us >= 0.1 ? 0 : 1) + " ns";
}

function format_bytes(bytes) {
  const [size, unit] = bytes >= 1048576 ? [1048576, "MiB"] : bytes >= 1024 ? [1024, "KiB"] : [1, "B"];
  return (bytes / size).toFixed(size === 1 ? 0 : 1) + " " + unit;
}

// What `data` holds as objects with absolute times.
function unpack_timeline(data) {
  const columns = data.kernels;
  const starts = running_sum(columns.start);
  const patterns = data.patterns.map(one => one.map(
    ([at, length, word, phase]) => ({at, length, word: data.words[word], phase: data.phases[phase]})));
  const kernels = starts.map((start, i) => ({
    number: i, start, end: start + columns.length[i], lane: columns.lane[i], layer: columns.layer[i],
    stage: data.stages[columns.stage[i]], phases: patterns[columns.pattern[i]],
    hbm: columns.hbm[i], l2: columns.l2[i], sent: columns.sent[i], on_path_ps: 0, on_path: [],
  }));
  const lanes = data.lanes.map(name => ({name, kernels: [], longest: 0}));
  for (const kernel of kernels) {
    lanes[kernel.lane].kernels.push(kernel);
  }
  for (const lane of lanes) lane.starts = lane.kernels.map(kernel => kernel.start);
  let now = 0;
  const path = data.path.length.map((length, i) => {
    const segment = {start: now, end: (now += length), word: data.words[data.path.word[i]],
                     kernel: kernels[data.path.kernel[i]] || null};
    if (segment.kernel) {
      segment.kernel.on_path_ps += length;
      segment.kernel.on_path.push(segment);
    }
    return segment;
  });
  const rates = data.rates.map(one => {
    const times = running_sum(one.time);
    let bytes = 0;
    const before = times.map((time, i) => (bytes += i ? one.rate[i - 1] * (time - times[i - 1]) : 0));
    return {...one, times, before};
  });
  return {step: data.step, kernels, lanes, path, path_starts: path.map(one => one.start), rates, layers: data.layers,
          num_layers: data.num_layers};
}

// Bytes (times a picosecond over a microsecond) that a rate has moved up to a time.
function moved_until(rate, time) {
  const i = first_above(rate.times, time) - 1;
  return i < 0 ? 0 : rate.before[i] + rate.rate[i] * (time - rate.times[i]);
}

// One chart. Its window is [from, to) in ps of the step; `whole` is the widest that it shows.
class TimelineChart {
  constructor(element, words, state) {
    Object.assign(this, {element, words, state, pointer: null, drag: null});
    this.canvas = document.createElement("div");
    this.canvas.className = "drawing";
    this.band = document.createElement("div");
    this.band.className = "band";
    this.band.hidden = true;
    element.append(this.canvas, this.band);
    this.listen();
    new ResizeObserver(() => this.schedule()).observe(element);
  }

  // Draws another timeline, from the widest window that it has.
  show(timeline, from, to) {
    this.timeline = timeline;
    this.whole = [from, to];
    this.from = from;
    this.to = to;
    this.occupied = new Set(timeline.kernels.filter(one => one.end > from && one.start < to).map(
      one => timeline.lanes[one.lane]));
    this.draw();
  }

  zoom_to(from, to) {
    const [least, most] = this.whole;
    const length = Math.min(Math.max(to - from, MIN_WINDOW_PS), most - least);
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(middle - length / 2, least), most - length);
    this.to = this.from + length;
    this.schedule();
  }

  // Around the pointer, or the middle where there is none.
  zoom_by(factor, x = this.pointer) {
    const at = x === null ? (this.from + this.to) / 2 : this.time_at(x);
    this.zoom_to(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan_by(share) {
    const shift = (this.to - this.from) * share;
    const [least, most] = this.whole;
    const bounded = Math.min(Math.max(shift, least - this.from), most - this.to);
    this.zoom_to(this.from + bounded, this.to + bounded);
  }

  reset() { this.zoom_to(...this.whole); }

  schedule() {
    if (!this.scheduled && this.timeline) {
      this.scheduled = requestAnimationFrame(() => { this.scheduled = 0; this.draw(); });
    }
  }

  x_of(time) { return this.left + (time - this.from) * this.scale; }
  time_at(x) { return this.from + (x - this.left) / this.scale; }

  draw() {
    const width = this.element.clientWidth;
    if (!this.timeline || !width) return;
    this.left = Math.min(LABEL_PX, Math.round(width * 0.16));
    this.right = width - 8;
    this.scale = (this.right - this.left) / (this.to - this.from);
    this.rows = [];
    this.labels = [];
    this.names = [];
    const parts = [];
    let y = 2;
    if (this.timeline.layers.length) {
      parts.push(this.draw_layers(y));
      y += ROW.layers + 3;
    }
    if (this.timeline.path.length) {
      parts.push(this.draw_path_row(y));
      y += ROW.path + ROW.between;
    }
    this.lane_y = [];
    for (const lane of this.timeline.lanes) {
      this.lane_y.push(y + ROW.kernel + 1);
      if (!this.occupied.has(lane)) continue;
      parts.push(this.draw_lane(lane, y));
      y += ROW.kernel + 2 + ROW.phase + ROW.between;
    }
    parts.push(this.draw_path_line());
    for (const rate of this.timeline.rates) {
      y += ROW.rate_gap - ROW.between;
      parts.push(this.draw_rate(rate, y));
      y += ROW.rate + ROW.between;
    }
    parts.push(this.draw_axis(y));
    y += ROW.axis;
    this.height = y;
    this.canvas.innerHTML =
      `<svg width="${width}" height="${y}">${parts.join("")}${this.names.join("")}${this.labels.join("")}</svg>`;
  }

  label(text, y, height) {
    const shown = text.replace(/ \(overlap (\d+)\)$/, " +$1");
    this.labels.push(`<text class="row" x="${this.left - 6}" y="${y + height / 2 + 4}"><title>${escape_text(text)
      }</title>${escape_text(shown)}</text>`);
  }

  // A name in the part of its bar that is in view: the longest of `names` that has room. Names are drawn last, so that
  // no line crosses them.
  add_name(names, x0, x1, y, height, attributes) {
    const from = Math.max(x0, this.left), to = Math.min(x1, this.right);
    const room = to - from - 2 * PADDING_PX;
    for (const name of names) {
      if (text_width(name) <= room) {
        this.names.push(`<text x="${((from + to) / 2).toFixed(1)}" y="${(y + height / 2 + 4).toFixed(1)}" ${
          attributes}>${escape_text(name)}</text>`);
        return;
      }
    }
  }
}
