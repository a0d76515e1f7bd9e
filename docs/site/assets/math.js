// Sets the equations that pymdownx.arithmatex marks; katex/ is KaTeX 0.16.11 with the
// fonts that the pages need.
for (const element of document.querySelectorAll(".arithmatex"))
  renderMathInElement(element, {
    delimiters: [
      { left: "\\(", right: "\\)", display: false },
      { left: "\\[", right: "\\]", display: true },
    ],
  });
