"""Slow float64 implementations of the published formulas, written without rolljax, to compare rolljax with."""
