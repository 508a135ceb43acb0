"""A recipe's report: `REPORT.md` and a self-contained `report.html`, from its results folder and its raw records."""
