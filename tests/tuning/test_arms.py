from headrace.tuning.measures import Assignment, By


def test_half_of_the_requests_have_the_treatment_and_always_the_same_half():
    arms = Assignment(By.REQUEST, 7, 0.0, 30.0)
    treated = [arms.treats(arms.unit(f"r{n}", "a", 0.0)) for n in range(4000)]
    assert 0.46 < sum(treated) / 4000 < 0.54
    assert treated == [arms.treats(arms.unit(f"r{n}", "b", 99.0)) for n in range(4000)]
    other = arms._replace(seed=8)
    assert treated != [other.treats(other.unit(f"r{n}", "a", 0.0)) for n in range(4000)]


def test_a_share_of_the_requests_has_the_treatment():
    arms = Assignment(By.REQUEST, 7, 0.0, 30.0, 0.1)
    treated = {n for n in range(4000) if arms.treats(f"r{n}")}
    assert 0.08 < len(treated) / 4000 < 0.12
    assert treated <= {n for n in range(4000) if arms._replace(share=0.3).treats(f"r{n}")}


def test_a_tenant_keeps_its_arm_for_a_period():
    arms = Assignment(By.TENANT, 7, 100.0, 30.0)
    assert arms.unit("r1", "a", 100.0) == arms.unit("r2", "a", 129.9)
    assert arms.unit("r1", "a", 129.9) != arms.unit("r1", "a", 130.0)
    seen = {arms.treats(arms.unit("r", "a", 100.0 + 30.0 * period)) for period in range(20)}
    assert seen == {True, False}


def test_a_restarted_experiment_goes_on_with_the_same_periods():
    before, spent = Assignment(By.TENANT, 7, 100.0, 30.0), 65.0
    after = before._replace(began=5000.0 - spent)
    assert after.unit("r", "a", 5000.0) == before.unit("r", "a", 165.0)
