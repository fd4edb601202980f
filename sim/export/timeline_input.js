// What a reader does with the charts: keys as in Perfetto, wheel, drag, search, the switch of the critical path.

"use strict";

const ZOOM = 0.8; // of the window, for one key or click
const PAN = 0.12;
const KEYS = {
  w: chart => chart.zoom_by(ZOOM), s: chart => chart.zoom_by(1 / ZOOM),
  a: chart => chart.pan_by(-PAN), d: chart => chart.pan_by(PAN),
  ArrowLeft: chart => chart.pan_by(-PAN), ArrowRight: chart => chart.pan_by(PAN),
  "+": chart => chart.zoom_by(ZOOM), "-": chart => chart.zoom_by(1 / ZOOM), "0": chart => chart.reset(),
};

Object.assign(TimelineChart.prototype, {
  listen() {
    const {element} = this;
    const at = event => event.clientX - element.getBoundingClientRect().left;
    element.addEventListener("pointerenter", () => { this.state.active = this; });
    element.addEventListener("focus", () => { this.state.active = this; });
    element.addEventListener("pointermove", event => {
      this.pointer = at(event);
      if (this.drag) this.move_drag(event); else this.tell(event);
    });
    element.addEventListener("pointerleave", () => { this.pointer = null; hide_tip(); });
    element.addEventListener("pointerdown", event => {
      if (event.button !== 0 || event.pointerType === "touch" || at(event) < this.left) return;
      this.drag = {x: at(event), from: this.from, to: this.to, pans: event.shiftKey};
      element.setPointerCapture(event.pointerId);
      hide_tip();
    });
    element.addEventListener("pointerup", event => this.end_drag(at(event)));
    element.addEventListener("pointercancel", () => { this.drag = null; this.band.hidden = true; });
    element.addEventListener("dblclick", () => this.reset());
    element.addEventListener("wheel", event => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        this.zoom_by(Math.exp(event.deltaY / 250), at(event));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        this.pan_by(event.deltaX / (this.right - this.left));
      }
    }, {passive: false});
  },

  move_drag(event) {
    const x = Math.min(Math.max(this.pointer, this.left), this.right);
    if (this.drag.pans) {
      const shift = (this.drag.x - x) / this.scale;
      this.zoom_to(this.drag.from + shift, this.drag.to + shift);
      return;
    }
    const [x0, x1] = [Math.min(x, this.drag.x), Math.max(x, this.drag.x)];
    this.band.hidden = false;
    Object.assign(this.band.style, {left: `${x0}px`, width: `${x1 - x0}px`});
  },

  end_drag(x) {
    const {drag} = this;
    this.drag = null;
    this.band.hidden = true;
    if (!drag || drag.pans || Math.abs(x - drag.x) < 4) return;
    const bounded = Math.min(Math.max(x, this.left), this.right);
    this.zoom_to(this.time_at(Math.min(bounded, drag.x)), this.time_at(Math.max(bounded, drag.x)));
  },

  tell(event) {
    const y = event.clientY - this.element.getBoundingClientRect().top;
    show_tip(this.lines_at(this.pointer, y), event.clientX, event.clientY);
  },
});

function show_tip(lines, x, y) {
  const tip = document.getElementById("tip");
  tip.hidden = !lines.length;
  if (!lines.length) return;
  tip.replaceChildren(...lines.map((line, i) => {
    const one = document.createElement(i ? "div" : "b");
    one.textContent = line;
    return one;
  }));
  const {offsetWidth, offsetHeight} = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + offsetHeight > innerHeight ? Math.max(4, y - offsetHeight - 10) : y + 18}px`;
}

function hide_tip() { document.getElementById("tip").hidden = true; }

// Keys go to the chart that was pointed at or focused last.
function listen_to_keys(state) {
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) return;
    if (event.key === "/" && state.search) {
      event.preventDefault();
      state.search.focus();
      return;
    }
    const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || !state.active || (event.key.startsWith("Arrow") && document.activeElement !== state.active.element)) return;
    event.preventDefault();
    act(state.active);
  });
}
