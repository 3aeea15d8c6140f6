"""Which layers need their bits: sensitivities, and the mix of schemes that keeps a budget."""

from ingot.measure.evaluate.doctor.doctor_samples import needs_of, records_of
from ingot.measure.evaluate.doctor.doctor_session import Diagnosis, Wanted, check_wanted, doctor

__all__ = ["Diagnosis", "Wanted", "check_wanted", "doctor", "needs_of", "records_of"]
