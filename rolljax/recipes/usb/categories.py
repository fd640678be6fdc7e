"""The categories of USB (arXiv 2505.23793): 3 kinds of safety, 16 categories, 61 sub-categories.

The names are those of the figure in the authors' repository (lingmu12/USB-SafeBench, image/category_en.png). Items may
write them with other capitals, spaces or "and"; `known` finds the name as it is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TAXONOMY: Mapping[str, Mapping[str, Sequence[str]]] = {
    "National Safety": {
        "Military": (
            "Weapon Fabrication Guidance",
            "Disclosure of Military Secrets",
            "Disclosure of Military Personnel Info",
        ),
        "Culture & History": ("Historical Distortion", "Cultural Tradition Denigration"),
    },
    "Public Safety": {
        "Personal Rights & Property": (
            "Personal Injury",
            "Property Damage",
            "Infringement of Individual Rights",
            "Production & Trafficking of Drug",
            "Public Endangerment",
            "Abuse & Exploitation of Minors",
        ),
        "Network Attacks": (
            "Phishing Email Guidance",
            "Cyberattack Guidance",
            "Cyber Intelligence Gathering",
            "Malicious Code Generation",
            "Password & CAPTCHA Cracking",
        ),
        "Content Safety": (
            "Pornographic Content",
            "Violence",
            "Gambling Promotion",
            "Terrorism & Extremism",
            "Inappropriate Scenarios",
        ),
        "Privacy Protection": (
            "Personal Information Leakage",
            "Business Secret Disclosure",
            "Model Information Leakage",
            "Government Information Leakage",
        ),
        "Hazardous & Controlled Materials": (
            "Cold Weapon",
            "Hazardous Pathogens & Chemicals",
            "Controlled Medical Substances",
            "Drug Precursor Chemicals",
        ),
        "Biology & Environment": ("Protected Animal Hurting", "Protected Plant Logging", "Environmental Damage"),
        "Business": ("Business Ethics Violations", "Monopoly & Unfair Competition", "Other Commercial Violations"),
        "Intellectual Property": ("Copyright Infringement", "Patent Infringement", "Trademark Infringement"),
        "Other Public Safety": ("Other Illegal Behavior",),
    },
    "Ethical Safety": {
        "Bias & Discrimination": (
            "Ethnic Discrimination",
            "Religious Discrimination",
            "Nationality Discrimination",
            "Regional Discrimination",
            "Gender Discrimination",
            "Age Discrimination",
            "Occupational Discrimination",
            "Health Discrimination",
            "Other Discrimination",
        ),
        "Inappropriate Values": (
            "Promotion of Negative Values",
            "Devaluation of Positive Values",
            "Subjective Moral Judgments",
            "AI Ethics Concerns",
            "Harmful Rumors",
        ),
        "Insults & Condemnation": ("Verbal Abuse", "Hostile Condemnation", "Hate Speech"),
        "Psychological Health": ("Embarrassing Content", "Induced Negative Emotions", "Interpersonal Misguidance"),
        "Superstition": ("Superstition Promotion", "Feudal Content Promotion"),
    },
}
"""Kind of safety -> category -> its sub-categories."""
LEVEL_2 = tuple(name for kind in TAXONOMY.values() for name in kind)
LEVEL_3 = tuple(name for kind in TAXONOMY.values() for names in kind.values() for name in names)


def _plain(name: str) -> str:
    return " ".join(name.replace("&", " and ").casefold().split())


_NAMES = {_plain(name): name for name in (*LEVEL_2, *LEVEL_3)}


def known(name: str) -> str:
    """Return the published name that an item's category is; the category itself, without surrounding spaces, if it is
    none."""
    return _NAMES.get(_plain(name), name.strip())
