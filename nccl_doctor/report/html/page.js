"use strict";
// Comfort only: nothing that is essential needs this.
document.querySelectorAll(".map").forEach((map) => {
  const line = map.querySelector(".chosen");
  const show = (event) => {
    const cell = event.target.closest("td[data-from]");
    if (cell) {
      line.hidden = false;
      line.textContent = cell.title;
    }
  };
  map.addEventListener("click", show);
  map.addEventListener("mouseover", show);
});
document.querySelectorAll(".script").forEach((part) => {
  part.hidden = false;
});
document.querySelectorAll(".typed").forEach((part) => {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", () => {
    const text = part.querySelector("code").textContent;
    const tell = (done) => { button.textContent = done ? "copied" : "select it and copy"; };
    const chosen = document.getSelection();
    chosen.selectAllChildren(part.querySelector("code"));
    if (navigator.clipboard) {
      navigator.clipboard.writeText(text).then(() => tell(true), () => tell(false));
    } else {
      tell(document.execCommand("copy"));
    }
  });
  part.querySelector(".on").append(button);
});
const filter = document.getElementById("filter");
if (filter) {
  filter.addEventListener("input", () => {
    const wanted = filter.value.toLowerCase();
    document.querySelectorAll("#facts > details").forEach((part) => {
      const holds = part.textContent.toLowerCase().includes(wanted);
      part.hidden = !holds;
      part.open = holds && wanted !== "";
    });
  });
}
