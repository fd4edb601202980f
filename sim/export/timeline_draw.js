// The rows of a timeline's chart. Each function returns SVG of what is in view.

"use strict";

// Neighbouring bars below a pixel, by pixel: `add` the time of each, `flush` one rectangle a run of equal winners.
class Gathered {
  constructor(chart, y, height) {
    Object.assign(this, {chart, y, height, column: null, times: new Map(), run: null, parts: []});
  }

  add(x0, x1, style) {
    const column = Math.floor((x0 + x1) / 2);
    if (column !== this.column) {
      this.close_column();
      this.column = column;
    }
    this.times.set(style, (this.times.get(style) || 0) + x1 - x0);
  }

  close_column() {
    if (this.column === null) return;
    let winner = null, most = -1;
    for (const [style, time] of this.times) if (time > most) [winner, most] = [style, time];
    this.times.clear();
    if (this.run && this.run.style === winner && this.run.end === this.column) {
      this.run.end += 1;
    } else {
      this.close_run();
      this.run = {style: winner, start: this.column, end: this.column + 1};
    }
    this.column = null;
  }

  close_run() {
    if (!this.run) return;
    const {start, end, style} = this.run;
    this.parts.push(`<rect x="${start}" y="${this.y}" width="${end - start}" height="${this.height}" ${style}/>`);
    this.run = null;
  }

  // A bar of at least a pixel ends what was gathered before it.
  flush() {
    this.close_column();
    this.close_run();
  }
}

function rect(x0, x1, y, height, style) {
  return `<rect x="${x0.toFixed(2)}" y="${y}" width="${(x1 - x0).toFixed(2)}" height="${height}" ${style}/>`;
}

Object.assign(TimelineChart.prototype, {
  // Ends of a bar on the screen, cut at those of the plot.
  ends(start, end) {
    return [Math.max(this.x_of(start), this.left), Math.min(this.x_of(end), this.right)];
  },

  style_of(word, on = true) {
    const known = this.words[word];
    const number = known ? known.number : 0;
    return `class="w${number}${on ? "" : " off"}"`;
  },

  draw_layers(y) {
    this.label("layer", y, ROW.layers);
    this.rows.push({kind: "layers", y, height: ROW.layers});
    const gathered = new Gathered(this, y, ROW.layers);
    for (const [i, one] of this.timeline.layers.entries()) {
      if (one.end <= this.from || one.start >= this.to) continue;
      const [x0, x1] = this.ends(one.start, one.end);
      if (x1 - x0 < 1) {
        gathered.add(x0, x1, 'class="layer"');
        continue;
      }
      gathered.flush();
      gathered.parts.push(rect(x0, x1, y, ROW.layers, `class="layer${i % 2 ? " odd" : ""}"`));
      this.add_name(one.names, x0, x1, y, ROW.layers, 'class="name"');
    }
    gathered.flush();
    return gathered.parts.join("");
  },

  draw_path_row(y) {
    this.label("critical path", y, ROW.path);
    this.rows.push({kind: "path", y, height: ROW.path});
    const {path, path_starts} = this.timeline;
    const gathered = new Gathered(this, y, ROW.path);
    for (let i = Math.max(0, first_above(path_starts, this.from) - 1); i < path.length && path[i].start < this.to; i++) {
      let {start, end, word} = path[i];
      while (i + 1 < path.length && path[i + 1].word === word && path[i + 1].start < this.to) end = path[++i].end;
      const [x0, x1] = this.ends(start, end);
      if (x1 - x0 < 1) {
        gathered.add(x0, x1, this.style_of(word));
        continue;
      }
      gathered.flush();
      gathered.parts.push(rect(x0, x1, y, ROW.path, `${this.style_of(word)} data-path="${i}"`));
      this.add_name([word], x0, x1, y, ROW.path, `class="name t${this.words[word].number}"`);
    }
    gathered.flush();
    return gathered.parts.join("");
  },

  draw_lane(lane, y) {
    this.label(lane.name, y, ROW.kernel);
    this.rows.push({kind: "kernels", lane, y, height: ROW.kernel + 1});
    this.rows.push({kind: "phases", lane, y: y + ROW.kernel + 1, height: ROW.phase + 2});
    const {dim, found} = this.state;
    const bars = new Gathered(this, y, ROW.kernel), phases = new Gathered(this, y + ROW.kernel + 2, ROW.phase);
    const last = lane.kernels.length;
    for (let i = Math.max(0, first_above(lane.starts, this.from) - 1); i < last && lane.starts[i] < this.to; i++) {
      const kernel = lane.kernels[i];
      if (kernel.end <= this.from) continue;
      const [x0, x1] = this.ends(kernel.start, kernel.end);
      const missed = found !== null && !found(kernel);
      const faded = missed || (dim && !kernel.on_path_ps);
      const style = `class="kernel${i % 2 ? " odd" : ""}${faded ? " off" : ""}${found && !missed ? " hit" : ""}"`;
      if (x1 - x0 < 1) {
        bars.add(x0, x1, style);
      } else {
        bars.flush();
        bars.parts.push(rect(x0, x1, y, ROW.kernel, `${style} data-kernel="${kernel.number}"`));
        const short = kernel.stage.slice(kernel.stage.indexOf(".") + 1);
        this.add_name([kernel.stage, short], x0, x1, y, ROW.kernel,
          `class="name stage${faded ? " off" : ""}" data-kernel="${kernel.number}"`);
      }
      this.draw_phases(kernel, phases, missed);
    }
    bars.flush();
    phases.flush();
    return bars.parts.join("") + phases.parts.join("");
  },

  draw_phases(kernel, gathered, missed) {
    for (const phase of kernel.phases) {
      const start = kernel.start + phase.at, end = start + phase.length;
      if (end <= this.from || start >= this.to) continue;
      for (const [from, to, on] of this.state.dim ? pieces(kernel, start, end) : [[start, end, true]]) {
        const [x0, x1] = this.ends(from, to);
        const style = this.style_of(phase.word, on && !missed);
        if (x1 - x0 < 1) {
          gathered.add(x0, x1, style);
          continue;
        }
        gathered.flush();
        gathered.parts.push(rect(x0, x1, gathered.y, ROW.phase, `${style} data-kernel="${kernel.number}"`));
        this.add_name([phase.word], x0, x1, gathered.y, ROW.phase,
          `class="name t${this.words[phase.word].number}${on && !missed ? "" : " off"}"`);
      }
    }
  },
});

// A stretch of a kernel as [start, end, on the critical path?].
function pieces(kernel, start, end) {
  const found = [];
  let now = start;
  for (const segment of kernel.on_path) {
    if (segment.end <= now || segment.start >= end) continue;
    const from = Math.max(segment.start, now), to = Math.min(segment.end, end);
    if (from > now) found.push([now, from, false]);
    found.push([from, to, true]);
    now = to;
  }
  if (now < end) found.push([now, end, false]);
  return found;
}

Object.assign(TimelineChart.prototype, {
  // The critical path through the lanes: along the kernel that it is in, and across where it goes on in another. Where
  // it changes lanes every few pixels, lines across would hide all else.
  draw_path_line() {
    const {path, path_starts} = this.timeline;
    const pieces = [];
    for (let i = Math.max(0, first_above(path_starts, this.from) - 1); i < path.length && path[i].start < this.to; i++) {
      const {start, end, kernel} = path[i];
      if (!kernel) continue;
      const [x0, x1] = this.ends(start, end), last = pieces[pieces.length - 1];
      if (last && last.lane === kernel.lane) last.x1 = x1; else pieces.push({lane: kernel.lane, x0, x1});
    }
    const across = pieces.length * 12 < this.right - this.left;
    let line = "";
    for (const [i, {lane, x0, x1}] of pieces.entries()) {
      const y = this.lane_y[lane];
      line += i && across ? `H${x0.toFixed(1)}V${y}` : `M${x0.toFixed(1)} ${y}`;
      line += `H${x1.toFixed(1)}`;
    }
    return line && `<path class="route" d="${line}"/>`;
  },

  // The mean rate of each two pixels.
  draw_rate(rate, y) {
    const per_second = rate.capacity * 1e6; // bytes
    const [size, unit] = per_second >= 1e12 ? [1e12, "TB/s"] : [1e9, "GB/s"];
    const num_bins = Math.max(1, Math.floor((this.right - this.left) / 2));
    const bin = (this.to - this.from) / num_bins;
    const bottom = y + ROW.rate, full = ROW.rate - 6;
    const mean = i => (moved_until(rate, this.from + (i + 1) * bin) - moved_until(rate, this.from + i * bin)) / bin;
    this.rows.push({kind: "rate", y, height: ROW.rate, rate, bin, mean, size, unit});
    const means = Array.from({length: num_bins}, (_, i) => mean(i));
    // Of a link that carries little, the scale is what it carries at most, or nothing would be seen of it.
    const most = Math.max(...means), fills = most > rate.capacity / 4 || !most;
    const scale = fills ? rate.capacity : most;
    this.label(rate.name, y - 2, ROW.rate / 2);
    this.label(`${fills ? "" : "to "}${(scale * 1e6 / size).toPrecision(3)} ${unit}`, y + 13, ROW.rate / 2);
    if (!fills) this.label(`of ${(per_second / size).toPrecision(3)}`, y + 27, ROW.rate / 2);
    let shape = `M${this.left} ${bottom}`;
    for (let i = 0; i < num_bins; i++) {
      const height = Math.min(1.05, means[i] / scale) * full;
      shape += `V${(bottom - height).toFixed(1)}H${(this.left + (i + 1) * 2).toFixed(0)}`;
    }
    return `<path class="rate" data-bin="${bin.toFixed(0)}" d="${shape}V${bottom}Z"/>` +
      (fills ? `<path class="capacity" d="M${this.left} ${bottom - full}H${this.right}"/>` : "") +
      `<path class="rule" d="M${this.left} ${bottom + 0.5}H${this.right}"/>`;
  },

  draw_axis(y) {
    const least = (this.to - this.from) / Math.max(2, (this.right - this.left) / 90);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map(one => one * power).find(one => one >= least);
    const origin = this.whole[0];
    const in_ns = step < PS_PER_US / 10 && this.to - this.from < PS_PER_US * 2;
    const digits = Math.max(0, -Math.floor(Math.log10(step / (in_ns ? 1000 : PS_PER_US)) + 1e-9));
    const parts = [];
    for (let i = Math.ceil((this.from - origin) / step); origin + i * step <= this.to; i++) {
      const x = this.x_of(origin + i * step);
      const shown = (i * step / (in_ns ? 1000 : PS_PER_US)).toLocaleString(
        "en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
      parts.push(`<path class="rule" d="M${x.toFixed(1)} ${y}v5"/>`);
      if (x > this.left + 12 && x < this.right - 16) {
        parts.push(`<text class="tick" x="${x.toFixed(1)}" y="${y + 16}">${shown}</text>`);
      }
    }
    const from = this.element.dataset.origin || "the start of the step";
    this.labels.push(`<text class="tick" x="${((this.left + this.right) / 2).toFixed(0)}" y="${y + 31}">time from ${
      escape_text(from)} (${in_ns ? "ns" : "µs"})</text>`);
    return parts.join("");
  },

  // What is under a point of the drawing, as lines of text; the first is a title.
  lines_at(x, y) {
    const row = this.rows.find(one => y >= one.y && y < one.y + one.height);
    if (!row || x < this.left || x > this.right) return [];
    const time = this.time_at(x);
    if (row.kind === "layers") {
      const one = this.timeline.layers.find(layer => layer.start <= time && time < layer.end);
      return one ? [one.names[0], this.extent(one)] : [];
    }
    if (row.kind === "path") {
      const one = this.timeline.path[first_above(this.timeline.path_starts, time) - 1];
      if (!one) return [];
      return [one.word, this.words[one.word].meaning, ...(one.kernel ? [`in ${this.title(one.kernel)}`] : []),
              this.extent(one)];
    }
    if (row.kind === "rate") {
      const mean = row.mean(Math.floor((time - this.from) / row.bin));
      return [`${row.rate.name}: ${(mean * 1e6 / row.size).toPrecision(3)} ${row.unit}`,
              `${(100 * mean / row.rate.capacity).toPrecision(2)} % of its rate, mean of ${format_time(row.bin)}`];
    }
    const kernel = row.lane.kernels[first_above(row.lane.starts, time) - 1];
    if (!kernel || kernel.end <= time) return [];
    if (row.kind === "phases") {
      const one = kernel.phases.find(phase => kernel.start + phase.at <= time &&
                                              time < kernel.start + phase.at + phase.length);
      if (!one) return [this.title(kernel), this.extent(kernel)];
      const start = kernel.start + one.at;
      return [one.word + (one.phase.toLowerCase() === one.word.toLowerCase() ? "" : ` (${one.phase})`),
              this.words[one.word].meaning, `in ${this.title(kernel)}`, this.extent({start, end: start + one.length})];
    }
    const moved = [["HBM", kernel.hbm], ["L2", kernel.l2], ["NVLink", kernel.sent]].filter(([, bytes]) => bytes);
    return [this.title(kernel), this.extent(kernel),
            kernel.on_path_ps ? `on the critical path for ${format_time(kernel.on_path_ps)}` : "not on the critical path",
            ...(moved.length ? [moved.map(([name, bytes]) => `${name} ${format_bytes(bytes)}`).join(", ")] : []),
            ...summed(kernel.phases).map(([word, length]) => `${word} ${format_time(length)}`)];
  },

  title(kernel) {
    const count = this.timeline.num_layers;
    return kernel.layer >= 0 && kernel.layer < count ? `${kernel.stage}, layer ${kernel.layer}` : kernel.stage;
  },

  extent({start, end}) {
    const origin = this.whole[0];
    return `${format_time(end - start)}, from ${format_time(start - origin)} to ${format_time(end - origin)}`;
  },
});

// Lengths by word, the longest first.
function summed(phases) {
  const totals = new Map();
  for (const {word, length} of phases) totals.set(word, (totals.get(word) || 0) + length);
  return [...totals].sort((one, other) => other[1] - one[1]);
}
