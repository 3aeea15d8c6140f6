"""Which layers need their bits: sensitivities, and the mix of schemes that keeps a budget.

Owns nothing itself.

    found = doctor(Wanted("checkpoint", QuantConfig(scheme), 0.01), read_data(Path("text.txt")))
"""

from ingot.measure.evaluate.doctor.doctor_samples import needs_of, records_of
from ingot.measure.evaluate.doctor.doctor_session import Diagnosis, Wanted, check_wanted, doctor

__all__ = ["Diagnosis", "Wanted", "check_wanted", "doctor", "needs_of", "records_of"]
