"use strict";
// Bokeh draws on a canvas, which style sheets do not reach: colours are set here.
const THEMES = {
  light: {paper: "#ffffff", ink: "#1d2026", line: "#dde1e8"},
  dark: {paper: "#15181d", ink: "#e6e8ec", line: "#323843"},
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const figures = () => Bokeh.documents.flatMap((d) => d.roots());

function paint() {
  const theme = THEMES[dark.matches ? "dark" : "light"];
  for (const figure of figures()) {
    figure.background_fill_color = theme.paper;
    figure.border_fill_color = theme.paper;
    figure.outline_line_color = theme.line;
    for (const axis of [...figure.below, ...figure.left]) {
      axis.axis_label_text_color = theme.ink;
      axis.major_label_text_color = theme.ink;
      axis.axis_line_color = theme.line;
      axis.major_tick_line_color = theme.line;
      axis.minor_tick_line_color = null;
    }
    for (const grid of figure.center) grid.grid_line_color = theme.line;
  }
}

function start() {
  if (!Bokeh.documents.length) return setTimeout(start, 20);
  paint();
  dark.addEventListener("change", paint);
  // a finger that scrolls the page must not zoom: there the toolbar turns it on
  if (matchMedia("(pointer: coarse)").matches) {
    for (const figure of figures()) figure.toolbar.active_drag = null;
  }
  for (const box of document.querySelectorAll("#shown input")) {
    box.addEventListener("change", () => {
      for (const figure of figures()) {
        for (const line of figure.renderers) {
          if (line.tags.includes(box.value)) line.visible = box.checked;
        }
      }
    });
  }
}
addEventListener("load", start);
