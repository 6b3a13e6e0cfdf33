// "Edit here" below each whole program: the page that needs no installation, compact, in the place of the block
// (docs/browser.md). Nothing of it is loaded before the button is pressed. One editor is open at a time.
"use strict";
(() => {
  if (!location.protocol.startsWith("http")) return; // a page from a file may start no worker
  let close = () => {};
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => ({ dark: true, light: false })[document.body.dataset.theme] ?? system.matches;

  // The editor asks the system for its theme, which the reader may have changed on this page.
  const themed = (inside) => {
    const rules = [...inside.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
    const dark = rules.filter((rule) => rule.media?.mediaText.includes("prefers-color-scheme"));
    return () => {
      for (const rule of dark) rule.media.mediaText = isDark() ? "all" : "not all";
      inside.documentElement.style.colorScheme = isDark() ? "dark" : "light";
    };
  };
  const open = (block, link, button) => {
    close();
    const [page, code] = link.href.split("#");
    const frame = document.createElement("iframe");
    frame.className = "editor-here";
    frame.title = "The program in an editor, and what each device does";
    frame.src = `${page}?compact#${code}`;
    const keep = () => (link.href = page + (frame.contentWindow.location.hash || `#${code}`)); // with what was edited
    let colour = () => {};
    const observer = new MutationObserver(() => colour());
    const recolour = () => colour();
    frame.addEventListener("load", () => {
      const inside = frame.contentDocument;
      colour = themed(inside);
      colour();
      new ResizeObserver(() => (frame.style.height = `${inside.body.offsetHeight + 2}px`)).observe(inside.body);
      inside.getElementById("text")?.focus({ preventScroll: true });
    });
    observer.observe(document.body, { attributeFilter: ["data-theme"] });
    system.addEventListener("change", recolour);
    for (const event of ["pointerdown", "focus"]) link.addEventListener(event, keep);
    block.hidden = true;
    block.after(frame);
    button.textContent = "close the editor";
    button.ariaExpanded = "true";
    close = () => {
      keep();
      for (const event of ["pointerdown", "focus"]) link.removeEventListener(event, keep);
      observer.disconnect();
      system.removeEventListener("change", recolour);
      frame.remove(); // and its worker ends
      block.hidden = false;
      button.textContent = "edit here";
      button.ariaExpanded = "false";
      close = () => {};
    };
  };
  for (const below of document.querySelectorAll("p.in-browser")) {
    const block = below.previousElementSibling;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "edit here";
    button.ariaExpanded = "false";
    button.addEventListener("click", () => {
      if (button.ariaExpanded === "true") close();
      else open(block, below.querySelector("a"), button);
    });
    below.prepend(button, " · ");
  }
})();
