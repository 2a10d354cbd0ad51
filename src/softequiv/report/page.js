"use strict";
const dial = document.getElementById("dial");
const levels = dial.dataset.levels.split(" ");

function turn() {
  const level = levels[dial.value];
  document.getElementById("level").value = level;
  dial.setAttribute("aria-valuetext", "softness " + level);
  for (const element of document.querySelectorAll(".level")) element.textContent = level;
  for (const element of document.querySelectorAll("[data-stop]")) element.hidden = element.dataset.stop !== dial.value;
  for (const point of document.querySelectorAll("[data-mark]"))
    point.classList.toggle("current", point.dataset.mark === dial.value);
}

function sortKey(text) {
  const value = parseFloat(text);
  return Number.isNaN(value) ? text : value;
}

function sortAll(column, down) {
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [sortKey(row.cells[column].textContent), row]);
    rows.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
    body.append(...rows.map(([, row]) => row));
    [...table.tHead.rows[0].cells].forEach((cell, i) => {
      if (i === column) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }
}

dial.addEventListener("input", turn);
for (const button of document.querySelectorAll("table.sortable button"))
  button.addEventListener("click", () => {
    const cell = button.parentElement;
    sortAll(cell.cellIndex, cell.getAttribute("aria-sort") === "ascending");
  });
turn();
