"""Think-J (arXiv 2505.14268): judges that think before they name the better of two answers."""

ENVIRONMENTS = {
    "digit_sums": "rolljax.recipes.think_j.digit_sums.DigitSums",
    "preferences": "rolljax.recipes.think_j.preferences.Preferences",
}
