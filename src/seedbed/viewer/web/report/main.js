// Fills the page that seedbed.viewer.report wrote: charts, and the episodes once they are looked at.
import plotStyle from "uplot/dist/uPlot.min.css";
import { Chart } from "./chart.js";
import { showWhenSeen } from "./player.js";

const style = document.createElement("style");
style.textContent = plotStyle;
document.head.prepend(style);

const report = JSON.parse(document.getElementById("report").textContent);
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const [group, number] = figure.dataset.chart.split(".").map(Number);
  const chart = new Chart(figure, report.groups[group].charts[number], report.groups[group].series, group);
  return { chart, group };
});

// A click on an entry of a legend hides and shows that series in all charts of its group.
for (const entry of document.querySelectorAll("button.entry")) {
  entry.addEventListener("click", () => {
    const [group, series] = entry.dataset.entry.split(".").map(Number);
    const shown = entry.getAttribute("aria-pressed") !== "true";
    entry.setAttribute("aria-pressed", String(shown));
    for (const each of charts) if (each.group === group) each.chart.show(series, shown);
  });
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { chart } of charts) chart.paint();
});
for (const holder of document.querySelectorAll("[data-player]")) {
  showWhenSeen(holder, report.players[Number(holder.dataset.player)]);
}
document.documentElement.dataset.state = "ready";
