{
  const box = document.querySelector(".routing");
  // [layer][token]: an expert, or several as "3 17 5 …", strongest first; "" where all tokens use the same ones
  const routing = JSON.parse(box.querySelector("script").textContent);
  const tokens = box.querySelector(".tokens");
  const slider = box.querySelector("input[type=range]");
  const legend = [...box.querySelectorAll(".legend li")];
  const same = box.querySelector(".same");
  const kind = (n) => `x${n % 8}` + (n < 8 ? "" : ` u${(Math.floor(n / 8) - 1) % 2 + 1}`);
  const show = () => {
    const layer = Number(slider.value), counts = legend.map(() => 0);
    [...tokens.children].forEach((token, i) => {
      const choice = routing[layer][i], expert = parseInt(choice);
      token.className = choice === "" ? "" : kind(expert);
      token.dataset.e = choice === "" ? "" : expert;
      token.title = choice === "" ? "all use the same experts" : same ? `experts ${choice.replaceAll(" ", ", ")}` : `expert ${expert}`;
      if (choice !== "") counts[expert] += 1;
    });
    const all = counts.reduce((a, b) => a + b);
    legend.forEach((item, n) => {
      const part = Math.round(100 * counts[n] / (all || 1));
      item.lastElementChild.textContent = `${part} %`;
      item.hidden = same !== null && part === 0;
    });
    if (same) same.hidden = all > 0;
    box.querySelector("output").textContent = layer;
  };
  slider.addEventListener("input", show);
  box.querySelector("input[type=checkbox]").addEventListener("change", (event) =>
    tokens.classList.toggle("numbered", event.target.checked));
  box.querySelector(".controls").hidden = false;
  show();  // a browser keeps the slider where it was when the page is loaded again
}
