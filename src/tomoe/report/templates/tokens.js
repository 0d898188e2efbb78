for (const box of document.querySelectorAll(".routing")) {
  const routing = JSON.parse(box.querySelector("script").textContent);  // [text][layer][token]
  const texts = [...box.querySelectorAll(".tokens")].map((p) => [...p.children]);
  const slider = box.querySelector("input[type=range]");
  const legend = [...box.querySelectorAll(".legend li span:last-child")];
  const kind = (n) => `x${n % 8}` + (n < 8 ? "" : ` u${(Math.floor(n / 8) - 1) % 2 + 1}`);
  const show = () => {
    const layer = Number(slider.value), counts = legend.map(() => 0);
    texts.forEach((tokens, t) => tokens.forEach((token, i) => {
      const expert = routing[t][layer][i];
      counts[expert] += 1;
      token.className = kind(expert);
      token.dataset.e = expert;
      token.title = `expert ${expert}`;
    }));
    const all = counts.reduce((a, b) => a + b);
    legend.forEach((span, n) => { span.textContent = `${Math.round(100 * counts[n] / all)} %`; });
    box.querySelector("output").textContent = layer;
  };
  slider.addEventListener("input", show);
  box.querySelector("input[type=checkbox]").addEventListener("change", (event) =>
    box.querySelectorAll(".tokens").forEach((p) => p.classList.toggle("numbered", event.target.checked)));
  box.querySelector(".controls").hidden = false;
  show();  // a browser keeps the slider where it was when the page is loaded again
}
