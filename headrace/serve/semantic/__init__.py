"""The semantic cache (L2): a near question's answer, where a calibrated judge promises that it is right."""
