/* The order of the search's results: pages before source files and measurements. The numbers are Sphinx's own. */
const ELSEWHERE = /^(source|benchmarks|CONTRIBUTING)/;
var Scorer = {
  score: ([page, , , , score]) => score - 20 * ELSEWHERE.test(page) + 1 * (page === "start"),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
