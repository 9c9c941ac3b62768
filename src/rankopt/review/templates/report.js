"use strict";
// Colours of text, grid and guide lines come from the style sheet, so that dark mode and print need
// no second drawing.
const common = {
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif", size: 13 },
  margin: { l: 8, r: 12, t: 26, b: 8 },
  height: 360,
  dragmode: false,
  hovermode: "closest",
  legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
};
const axis = { automargin: true, fixedrange: true, zeroline: false };
const titled = (title) => ({ title: { ...title, font: { size: 13 }, standoff: 8 } });
for (const place of document.querySelectorAll(".plot")) {
  const figure = JSON.parse(document.getElementById(place.id + "-figure").textContent);
  const layout = { ...common, ...figure.layout };
  layout.xaxis = { ...axis, ...figure.layout.xaxis, ...titled(figure.layout.xaxis.title) };
  layout.yaxis = { ...axis, ...figure.layout.yaxis, ...titled(figure.layout.yaxis.title) };
  Plotly.newPlot(place, figure.data, layout, { displayModeBar: false, responsive: true });
}
addEventListener("beforeprint", () => {
  for (const place of document.querySelectorAll(".plot")) Plotly.Plots.resize(place);
});
