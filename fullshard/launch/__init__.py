"""How processes start: the configuration file, the questionnaire, the launcher. Importing it is cheap."""
