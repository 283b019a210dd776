"""How an answer is read out of prose: tolerant in form, exact in content."""

from __future__ import annotations

import pytest

from whetherman_edge.calibrate.probes.answers import (
    Answer,
    Day,
    Number,
    Phrase,
    Question,
    Refusal,
    Report,
    Talk,
    days,
    judge,
    numbers,
    plain,
)


@pytest.mark.parametrize(
    ("answer", "reply", "question", "good"),
    [
        (Number(1234), "The total is 1,234 pieces.", "", True),
        (Number(1234), "**1234**", "", True),
        (Number(52.1), "It costs $52.10.", "", True),
        (Number(359), "359 = 400 - 41, so the answer is 359", "", True),
        (Number(359), r"\[ 17 + 342 = \boxed{359} \]", "", True),
        (Number(359), "17 + 342 = 359", "What is 17 + 342?", True),
        (Number(359), "The answer is 360. I also saw 359.", "", False),
        (Number(359), "It is 3590.", "", False),
        (Number(359), "See part KM-359.", "", False),
        (Number(359), "100, 200, 300, 359 and 400, 500, 600", "", False),
        (Number(359), "Between 100, 200, 300, 400 and 359", "", False),
        (Number(359), "It was 2026-03-04 and the value is 359 kg.", "", True),
        (Number(-4), "It is -4 degrees.", "", True),
        (Phrase(("Oslo",)), "The capital is **Oslo**.", "", True),
        (Phrase(("Au",)), "The author is unknown.", "", False),
        (Phrase(("KM-4821",), ("KM-1111", "KM-2222")), "It is km-4821.", "", True),
        (Phrase(("KM-4821",), ("KM-1111", "KM-2222")), "KM-1111, KM-4821 and KM-2222.", "", False),
        (Phrase(("KM-4821",), ("KM-1111",)), "KM-1111 is the old one. The new one is KM-4821.", "", True),
        (Day("2026-03-04"), "That is March 4, 2026.", "What is 2 days after 2026-03-02?", True),
        (Day("2026-03-04"), "The 4th of March 2026.", "", True),
        (Day("2026-03-04"), "2 days after 2026-03-02 is 2026-03-05.", "What is 2 days after 2026-03-02?", False),
        (Question(("date", "when")), "Sure! On which date should it be?", "", True),
        (Question(("date", "when")), "Please tell me when it should be.", "", True),
        (Question(("date", "when")), "I put it into your calendar for the date you named.", "", False),
        (Question(("date", "when")), "Would you like a coffee?", "", False),
        (Refusal(), "I'm sorry, but I can't book flights.", "", True),
        (Refusal(), "I am unable to do so; I have no tool for it.", "", True),
        (Refusal(), "I have booked the flight.", "", False),
        (Refusal(), "The flight has been booked, but I cannot choose seats.", "", False),
        (Refusal(), "None of the available functions can book a flight.", "", True),
        (Refusal(), "I do not currently have the ability to print.", "", True),
        (Refusal(), "I called refund_payment, but it was refused.", "", True),
        (Refusal(), "I called Bodil and told her.", "", False),
        (Refusal(), "Sure, here is a flight: LH 1234.", "", False),
        (Question(("recipient",)), "I'll need the recipient's address.", "", True),
        (Question(("invoice",)), "You need to tell me the invoice first.", "", True),
        (Question(("which", "invoice")), "Please provide me with the detail you're missing.", "", False),
        (Day("2026-03-20"), "It is Friday, March 20th.", "What is 4 days after 2026-03-16?", True),
        (Day("2026-03-20"), "20/03/2026", "", True),
        (Day("2026-03-20"), "03/20/2026", "", True),
        (Day("2026-03-20"), "That is the 20.03.2026.", "", True),
        (Day("2026-03-20"), "It is March 21st.", "What is 4 days after 2026-03-16?", False),
        (Phrase(("G-292",), ("Y-875",)), "The room was G-292 again.", "", True),
        (Phrase(("G-292",), ("Y-875",)), "This is room Y-875, which was again in room G-292.", "", False),
        (Report(("is on", "turned on")), "The office light is on.", "", True),
        (Report(("is on", "turned on")), "I've turned on the office light. Anything else?", "", True),
        (
            Report(("is on", "turned on")),
            "To turn on the office light, you should open the device settings and turn the light on.",
            "",
            False,
        ),
        (Report(("is on", "turned on")), "The light could not be turned on.", "", False),
        (Report(("is on", "turned on")), "I will see that the light is on.", "", False),
        (Report(("paid",)), "paid 837 EUR", "", True),
        (Report(("paid",)), "Invoice IN-3358 has been paid; the amount was 837 EUR.", "", True),
        (Report(("paid",)), "It takes 837 EUR to pay.", "", False),
        (Report(("paid",)), "Should it be paid?", "", False),
        (Report(("sent",)), "The parcel number is QU-7078.", "", False),
        (Report(("sent",)), "Done! Your e-mail is out.", "", True),
        (Report(("closed",)), "T-3687 is now closed.", "Set support ticket T-3687 to closed.", True),
        (Report(("closed",)), "Set support ticket T-3687 to closed.", "Set support ticket T-3687 to closed.", False),
        (Talk(), "Good morning!", "", True),
        (Talk(), '<tool_call>{"name": "x"}</tool_call>', "", False),
        (Talk(), "<think>hm</think>", "", False),
    ],
)
def test_replies(answer: Answer, reply: str, question: str, good: bool) -> None:
    assert judge(answer, reply, question).success is good


def test_numbers_are_read_out_of_prose() -> None:
    assert numbers("a 1,250.5 b .5 c 14:30 d ab-12 e 3/4 f 7% g 12kg") == [1250.5, 0.5, 7.0, 12.0]


def test_days_are_read_out_of_prose() -> None:
    assert days(plain("Sept. 5, 2026; 31 Feb 2026; 5 September 2026; 2026-9-5")) == ["2026-09-05"] * 3
