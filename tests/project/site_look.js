// What of a page's content cannot be seen, one line each; a promise. test_site.py runs it in a browser.
(async () => {
  const frame = () => new Promise(resolve => requestAnimationFrame(resolve));
  // The theme puts tables into boxes once it runs, which takes a few frames.
  const bare = () => document.querySelector("script[src*=bundle]") &&
    document.querySelector(".md-typeset table:not([class])")?.closest(".md-typeset__table") === null;
  for (let i = 0; i < 100 && bare(); i++) await frame();
  await frame();

  const found = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  const name = element => `<${element.localName}> ${element.textContent.trim().slice(0, 40).trim()}`;
  const scrolls = style => ["auto", "scroll"].includes(style.overflowX);

  for (const element of document.querySelectorAll(".md-content *")) {
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (!box.width || !box.height || style.visibility === "hidden") continue;
    const hides = element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0 && style.display !== "inline";
    if (hides && ["hidden", "clip"].includes(style.overflowX)) found.push(`${name(element)}: cut off`);
    if (hides && scrolls(style) && style.backgroundImage === "none")
      found.push(`${name(element)}: scrolls, and nothing shows it`);
    let outer = element.parentElement;
    while (outer && !scrolls(getComputedStyle(outer))) outer = outer.parentElement;
    if (!outer && (box.right > width + 1 || box.left < -1)) found.push(`${name(element)}: beyond the window`);
    const lines = new Set([...element.getClientRects()].map(line => Math.round(line.top)));
    if (element.matches("td code, th code") && lines.size > 1 && !/[\s-]/.test(element.textContent))
      found.push(`${name(element)}: divided within a word`);
  }
  return [...new Set(found)];
})()
