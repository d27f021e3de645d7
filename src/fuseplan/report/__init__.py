"""What fuseplan shows: charts of measurements, and the reference pages made from the code."""
