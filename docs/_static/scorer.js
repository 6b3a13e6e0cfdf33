/* The order of what the search finds: Sphinx asks this object for the weight of each result.

   A page that is named as the query comes first, then guides; what is generated (a page for each
   operator and diagnostic) and records of changes come after the pages that explain. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  /* The share of its score that a page keeps, by the beginning of its name. Of equals, the pages that
     introduce a subject come first. */
  shares: {
    "docs/start": 1.4,
    "docs/layouts": 1.3,
    "docs/explain": 1.2,
    "docs/codes/": 0.2,
    "docs/operators/": 0.5,
    "docs/codes": 0.4,
    CHANGELOG: 0.2,
    "docs/decisions": 0.3,
    "docs/sources": 0.5,
  },
  named: 100,
  section: 0.8,

  score([page, , anchor, , score]) {
    const singular = (word) => word.toLowerCase().trim().replace(/s$/, "");
    const query = new URLSearchParams(window.location.search).get("q") ?? "";
    const name = page.split("/").pop();
    const whole = !anchor || singular(anchor.replace("#", "")) === singular(name);
    if (whole && singular(name) === singular(query)) return score + Scorer.named;
    const start = Object.keys(Scorer.shares).find((each) => page.startsWith(each));
    return score * (Scorer.shares[start] ?? 1) * (anchor ? Scorer.section : 1);
  },
};
