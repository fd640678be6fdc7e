"""STAgent (arXiv 2512.24957): a travel desk with tools, and a data pipeline that routes its tasks."""

ENVIRONMENTS = {"travel": "rolljax.recipes.stagent.travel.Travel"}
