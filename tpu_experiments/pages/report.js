"use strict";
const names = [...document.querySelectorAll(".legend button")].map((button) => button.textContent);
const hidden = new Set();
for (const button of document.querySelectorAll(".legend button")) {
  const run = button.dataset.run;
  const own = [...document.querySelectorAll("[data-run]")].filter((each) => each.dataset.run === run && each !== button);
  button.addEventListener("click", () => {
    hidden.has(run) ? hidden.delete(run) : hidden.add(run);
    button.setAttribute("aria-pressed", String(!hidden.has(run)));
    for (const each of own) each.style.display = hidden.has(run) ? "none" : "";
  });
  button.addEventListener("pointerenter", () => {
    for (const line of document.querySelectorAll(".plot .line")) line.classList.toggle("faint", line.dataset.run !== run);
  });
  button.addEventListener("pointerleave", () => {
    for (const line of document.querySelectorAll(".plot .line")) line.classList.remove("faint");
  });
}
for (const plot of document.querySelectorAll(".plot")) {
  const chart = JSON.parse(plot.dataset.chart);
  const guide = plot.querySelector(".guide");
  const tip = plot.parentElement.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const nearest = (points, step) =>
    points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const scale = plot.viewBox.baseVal.width / box.width;
    const x = Math.min(Math.max((event.clientX - box.left) * scale, chart.left), chart.right);
    const step = chart.x[0] + ((x - chart.left) / (chart.right - chart.left)) * (chart.x[1] - chart.x[0]);
    const shown = chart.lines.filter((line) => !hidden.has(String(line.run)));
    if (!shown.length) return;
    const rows = shown.map((line) => ({ run: line.run, point: nearest(line.points, step) }));
    rows.sort((a, b) => b.point[1] - a.point[1]);
    tip.replaceChildren(...rows.slice(0, 12).map(({ run, point }) => {
      const row = document.createElement("div");
      const name = document.createElement("span");
      const value = document.createElement("b");
      name.className = "c" + (run % 8);
      name.textContent = names[run];
      value.textContent = point[2] + " at " + point[0];
      row.append(name, value);
      return row;
    }));
    guide.setAttribute("x1", x);
    guide.setAttribute("x2", x);
    guide.style.visibility = "visible";
    tip.hidden = false;
    const figure = plot.parentElement.getBoundingClientRect();
    const left = x / scale + box.left - figure.left;
    tip.style.top = box.top - figure.top + 8 + "px";
    tip.style.left = (left > figure.width / 2 ? left - tip.offsetWidth - 12 : left + 12) + "px";
  });
  plot.addEventListener("pointerleave", () => {
    tip.hidden = true;
    guide.style.visibility = "hidden";
  });
}
