"""English phrases that mean one word: "speed up" and "faster", "get rid of" and "remove".

`one_worded` rewrites a text before the guards analyse it. Pure text in, text out.
"""

from __future__ import annotations

import re

from headrace.response_cache.rules.numerals import alternatives

_PHRASES = """
    speed_up/faster speeding_up/faster get_rid_of/remove getting_rid_of/remove rid_of/remove set_up/setup log_in/login
    log_into/login sign_in/login sign_into/login log_on/login log_out/logout sign_out/logout log_off/logout
    sign_up/signup turn_down/lower turn_up/raise turned_down/refused put_off/postpone call_off/cancel pick_up/collect
    find_out/find look_up/find figure_out/find work_out/exercise working_out/exercise get_in_touch_with/contact
    get_hold_of/contact send_back/return sending_back/return carry_out/perform throw_away/discard throw_out/discard
    give_up/quit fill_in/complete fill_out/complete go_down/fall went_down/fell come_down/fall came_down/fell
    come_out/release came_out/released coming_out/release in_place_of/instead_of swap_out/change switch_to/change_to
    united_states_of_america/usa united_states/usa the_us/the_usa united_kingdom/uk new_york_city/nyc
    e_mail/email wi_fi/wifi on_line/online per_day/daily each_day/daily every_day/daily a_day/daily per_week/weekly
    each_week/weekly every_week/weekly a_week/weekly per_month/monthly each_month/monthly every_month/monthly
    a_month/monthly per_year/yearly each_year/yearly every_year/yearly a_year/yearly
    in_order_to/to so_as_to/to stand_for/mean stands_for/mean short_for/mean take_place/happen
    mobile_phone/phone cell_phone/phone grown_up/adult grown_ups/adults as_well/also free_of_charge/free at_no_cost/free
    for_free/free stop_using/quit no_longer/not_anymore spend_less_on/save_money_on use_less/save
    how_frequently/how_often how_quickly/how_fast what_quantity_of/how_much what_amount_of/how_much
    in_what_year/when in_which_year/when what_year/when which_year/when on_what_date/when on_which_date/when
    on_what_day/when on_which_day/when at_what_time/when what_time/when for_what_reason/why how_come/why
    by_means_of/with made_out_of/made_of make_a_screenshot/take_a_screenshot
    difference_between/difference_of differences_between/differences_of distance_between/distance_of whether/if
    get_my_money_back/get_a_refund word_document/word pdf_file/pdf csv_file/csv json_file/json
    get_married/marry got_married/marry getting_married/marriage
    switch_on/turn_on switch_off/turn_off switched_on/turned_on switched_off/turned_off is_made/is_make
    are_made/are_make is_sold/is_sell are_sold/are_sell is_paid/is_pay stop_receiving/unsubscribe
    make_a_reservation/book book_a_table/book how_much_money_is_in/what_is_the_balance_of far_away/far close_to/near
    next_to/beside
"""
_MEANT = {
    phrase.replace("_", " "): word.replace("_", " ")
    for phrase, word in (each.split("/") for each in _PHRASES.split())
}
_ANY = re.compile(
    rf"\b(?:{alternatives(_MEANT)})\b".replace(r"\ ", r"[ -]"),
    re.IGNORECASE,
)


def one_worded(text: str) -> str:
    """``text`` with one word for each phrase that has one."""
    return _ANY.sub(lambda found: _MEANT[found[0].lower().replace("-", " ")], text)
