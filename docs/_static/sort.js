/* Tables of class "sortable": each head becomes a button that sorts by its column, up and then down. */
"use strict";

const NUMBER = /^[+-]?(\d[\d,]*\.?\d*|\.\d+)(e[+-]?\d+)?/i;

/* What a cell is sorted by: the number that it begins with, or else its text. */
function keyOf(cell) {
  const text = cell.textContent.trim();
  const number = NUMBER.exec(text);
  return number ? Number(number[0].replaceAll(",", "")) : text;
}

/* Numbers come before texts, and after them where the order is down. */
function compare(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b);
}

function sortBy(table, head) {
  const column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  const body = table.tBodies[0];
  const keyed = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[column]) }));
  const filled = keyed.filter(({ key }) => key !== "");
  filled.sort((a, b) => (down ? -1 : 1) * compare(a.key, b.key));
  const empty = keyed.filter(({ key }) => key === ""); // last in both orders
  body.append(...[...filled, ...empty].map(({ row }) => row));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
}

function makeSortable(table) {
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(table, head));
    head.append(button);
  }
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
});
