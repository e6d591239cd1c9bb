"""English word lists of the guards: function words, negations, opposites, words of time, persons and bounds, classes of
words that exclude each other, words of one meaning, and phrases that mean one word.

"My mother's birthday" and "my sister's birthday" differ in one word of the class ``family``, and have different
answers. A word may have several classes. "Speed up" is "faster": `one_worded` rewrites a text before the guards analyse
it. Another language needs another such file.
"""

from __future__ import annotations

import re

from headrace.response_cache.rules.spellings import alternatives, one_word, stem


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS = _words(
    """
    a an the of in on at to for from by with about into over and or but if then than as is are was were be been being
    am do does did doing done have has had having will would shall should can could may might must i you he she it we
    they me him her us them my your his its our their this that these those there here so too very just please what
    which who whom whose when where why how some any one also let lets get got im ive id ill whats hows wheres whos
    thats theres tell know want need like way s t m re ve ll d
    """
)
BEFORE_NOUNS = _words("the a an my your our his her their this that some any all most")
NO_ACTOR = _words("you it there we they he she one this that people someone")
"""Words behind an auxiliary that do not say what acts."""
POLITE_WORDS = _words("please pls hi hello hey thanks thank kindly so well ok okay and")
NEGATIONS = _words(
    """
    no not never without cannot neither nor none nothing nobody nowhere hardly barely except unless dont doesnt didnt
    isnt arent wasnt werent wont wouldnt cant couldnt shouldnt hasnt havent hadnt aint
    """
)
SIGN_WORDS = {"plus": "+", "minus": "-", "twice": "2"}
"""Words that count as numbers, beside those that `spellings.unify` writes as digits.

"One", "first", "second", "third" and "half" do not: a question mostly means the same without them (a second card,
third parties, half an hour). If two questions differ in such words, they count as opposites."""

TIMELY_WORDS = _words(
    "today todays tonight tomorrow yesterday currently latest recent recently upcoming nowadays"
)
NEGATING_PREFIXES = ("un", "in", "im", "dis", "de", "non", "ir", "il", "mis", "anti")

PLURALS = _words(
    """
    custom/customs glass/glasses damage/damages good/goods arm/arms manner/manners content/contents
    saving/savings premise/premises force/forces authority/authorities spirit/spirits ruin/ruins green/greens
    spectacle/spectacles ground/grounds minute/minutes air/airs
    security/securities cloth/clothes
    """
)
"""Words of which the plural means something else."""
_OPPOSITES = _words(
    """
    on/off enable/disable activate/deactivate open/close buy/sell before/after with/without first/last minimum/maximum
    min/max gain/lose win/lose import/export in/out up/down more/less most/least advantage/disadvantage pros/cons
    pro/con hot/cold left/right old/new best/worst good/bad better/worse credit/debit short/long shortest/longest
    high/low highest/lowest higher/lower lend/borrow send/receive give/receive given/received add/remove start/stop
    start/end begin/end accept/decline accept/reject male/female men/women man/woman boy/girl lock/unlock login/logout
    deposit/withdraw deposit/withdrawal freeze/unfreeze pass/fail true/false cheap/expensive strong/weak
    strongest/weakest legal/illegal positive/negative increase/decrease increase/reduce above/below inside/outside
    early/late earliest/latest love/hate like/dislike connect/disconnect install/uninstall subscribe/unsubscribe
    upgrade/downgrade allow/block allow/deny pause/resume hide/show push/pull mute/unmute raise/lower big/small
    large/small safe/dangerous easy/hard easy/difficult fast/slow full/empty hire/fire husband/wife father/mother
    brother/sister son/daughter day/night summer/winter north/south east/west black/white input/output encrypt/decrypt
    encode/decode upload/download sunrise/sunset morning/evening arrive/leave arrival/departure incoming/outgoing
    oldest/newest youngest/oldest attack/defend am/pm noon/midnight add/subtract multiply/divide
    second/third half/third half/quarter third/quarter in/outside within/outside succeed/fail success/failure
    even/odd short/detailed brief/detailed brief/long simplified/traditional single/double
    """
)


def _by_stem() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in _OPPOSITES:
        one, other = map(stem, pair.split("/"))
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return {word: frozenset(others) for word, others in found.items()}


OPPOSITES = _by_stem()
"""Stems, and the stems that mean the opposite."""


# -- classes of words ------------------------------------------------------------------------------


_CLASSES = {
    "family": """
        mother/mom/mum/mama father/dad/daddy/papa brother sister son daughter husband wife spouse uncle aunt
        cousin nephew niece grandfather/grandpa grandmother/grandma/granny grandson granddaughter parent
        child/kid/baby stepmother stepfather stepsister stepbrother motherinlaw fatherinlaw sisterinlaw brotherinlaw
        soninlaw daughterinlaw twin fiance girlfriend boyfriend roommate neighbor/neighbour
        friend boss colleague/coworker
    """,
    "nutrient": """
        protein fat carbohydrate/carbs/carb calorie/calories sugar salt/sodium fiber/fibre cholesterol
        calcium iron zinc magnesium potassium vitamin caffeine alcohol gluten lactose iodine omega
    """,
    "room": """
        kitchen bathroom/restroom/toilet bedroom livingroom living dining garage basement/cellar attic
        hallway office garden/yard/backyard balcony porch closet laundry nursery patio roof staircase lobby
        pantry
    """,
    "fruit": """
        apple orange banana grape strawberry blueberry raspberry cherry peach pear plum mango pineapple
        melon watermelon kiwi lemon lime coconut fig date apricot avocado pomegranate
    """,
    "vegetable": """
        carrot potato tomato onion garlic cucumber cabbage broccoli cauliflower spinach lettuce pumpkin pea
        bean corn celery radish eggplant/aubergine zucchini pepper mushroom leek beetroot
    """,
    "food": """
        bread rice pasta pizza burger sandwich soup salad steak sushi taco burrito noodle lasagna omelette
        pancake waffle cake pie cookie chocolate cheese butter yogurt egg honey jam curry
    """,
    "meat": "beef pork chicken turkey lamb fish salmon tuna shrimp bacon ham duck tofu",
    "drink": """
        coffee tea water milk juice beer wine whiskey/whisky vodka rum gin soda cola lemonade espresso latte
    """,
    "meal": "breakfast lunch dinner/supper brunch snack dessert appetizer",
    "cuisine": """
        italian chinese mexican indian japanese thai french greek korean vietnamese spanish turkish lebanese
        german american british ethiopian moroccan brazilian russian polish swedish irish portuguese dutch
    """,
    "colour": """
        red blue green yellow orange purple pink brown black white gray/grey gold silver beige turquoise
        violet magenta cyan navy maroon
    """,
    "animal": """
        dog/puppy cat/kitten horse cow pig sheep goat rabbit hamster mouse rat lion tiger bear wolf fox
        elephant giraffe zebra monkey gorilla kangaroo koala panda deer squirrel snake lizard turtle frog
        crocodile alligator shark whale dolphin octopus eagle owl parrot pigeon sparrow penguin chicken duck
        goose bee ant spider butterfly mosquito fly beetle snail goldfish parakeet camel donkey leopard
        cheetah
    """,
    "body": """
        head face eye ear nose mouth tooth/teeth tongue neck throat shoulder arm elbow wrist hand finger
        thumb chest back spine stomach/belly hip leg knee ankle foot/feet toe skin hair heart lung liver
        kidney brain bone muscle blood nail jaw forehead calf thigh heel
    """,
    "illness": """
        flu cold fever cough headache migraine diabetes cancer asthma allergy arthritis depression anxiety
        insomnia pneumonia bronchitis measles malaria hepatitis anemia hypertension nausea diarrhea
        constipation acne eczema covid stroke dementia epilepsy obesity
    """,
    "drug": """
        aspirin ibuprofen acetaminophen/paracetamol/tylenol penicillin amoxicillin insulin morphine codeine
        antibiotic antihistamine melatonin metformin xanax prozac
    """,
    "country": """
        america/usa/us britain/uk england scotland wales ireland france germany italy spain portugal
        netherlands belgium switzerland austria poland sweden norway denmark finland iceland russia ukraine
        greece turkey egypt morocco algeria nigeria kenya ethiopia india pakistan bangladesh china japan
        korea vietnam thailand malaysia singapore indonesia philippines australia canada mexico brazil
        argentina chile peru colombia venezuela cuba iran iraq israel syria lebanon jordan qatar hungary
        romania bulgaria serbia croatia slovenia slovakia estonia latvia lithuania luxembourg malta cyprus
    """,
    "city": """
        london paris berlin madrid rome vienna prague warsaw budapest athens lisbon dublin brussels
        amsterdam stockholm oslo copenhagen helsinki moscow istanbul cairo tokyo osaka beijing shanghai
        seoul delhi mumbai bangkok sydney melbourne toronto vancouver montreal boston chicago denver seattle
        dallas houston austin miami atlanta philadelphia phoenix portland detroit barcelona munich milan
        venice florence zurich geneva
    """,
    "continent": "europe asia africa australia antarctica",
    "planet": "mercury venus earth mars jupiter saturn uranus neptune pluto moon sun",
    "language": """
        english spanish french german italian portuguese dutch russian polish swedish norwegian danish
        finnish greek turkish arabic hebrew hindi urdu bengali chinese mandarin cantonese japanese korean
        vietnamese thai latin swahili czech hungarian romanian ukrainian persian
    """,
    "currency": """
        dollar/usd euro/eur pound/gbp yen/jpy yuan rupee ruble franc peso won krona lira bitcoin ethereum
        dogecoin
    """,
    "month": "january february march april june july august september october november december",
    "weekday": "monday tuesday wednesday thursday friday saturday sunday weekend",
    "season": "spring summer autumn/fall winter",
    "period": """
        second minute hour day/daily week/weekly month/monthly quarter/quarterly year/yearly/annual/annually
        decade century
    """,
    "daytime": "morning noon afternoon evening night midnight dawn dusk",
    "ordinal": "first second third fourth fifth sixth seventh eighth ninth tenth last next previous",
    "holiday": "christmas easter thanksgiving halloween hanukkah ramadan diwali valentine",
    "unit": """
        meter/metre mile yard foot/feet inch gram kilogram/kilo pound ounce ton liter/litre gallon pint quart
        cup tablespoon teaspoon celsius fahrenheit kelvin watt volt ampere joule acre hectare byte bit
        horsepower calorie pixel
    """,
    "quantity": """
        temperature weight/weigh height length width depth area volume speed distance age price/cost population
        size duration pressure density color/colour
    """,
    "statistic": "mean/average median mode maximum minimum sum total variance range",
    "bank": "checking savings credit debit mortgage loan pension investment brokerage",
    "card": "visa mastercard amex discover paypal",
    "payment": "cash check/cheque card transfer bitcoin paypal",
    "transport": """
        car bus train plane/airplane bicycle/bike motorcycle/motorbike truck boat ship taxi/cab subway/metro
        tram ferry scooter
    """,
    "carpart": """
        tire/tyre engine brake battery windshield wiper headlight clutch transmission radiator oil exhaust
        bumper
    """,
    "sport": """
        football soccer basketball baseball tennis golf hockey cricket rugby volleyball swimming boxing
        wrestling skiing snowboarding surfing cycling running badminton chess judo karate yoga pilates
    """,
    "instrument": """
        guitar piano violin drum flute trumpet saxophone cello clarinet harp bass ukulele banjo harmonica
    """,
    "music": "jazz rock pop classical blues country metal reggae techno opera",
    "genre": "comedy horror thriller drama romance western documentary animation",
    "device": """
        phone/smartphone laptop tablet desktop computer printer scanner keyboard mouse monitor camera router
        modem television/tv speaker headphone microphone watch/smartwatch console projector
    """,
    "appliance": """
        fridge/refrigerator freezer oven stove microwave dishwasher washer dryer toaster blender kettle
        vacuum fan heater thermostat lamp/light sprinkler alarm doorbell lock
    """,
    "system": "windows linux macos/mac android ios ubuntu debian fedora",
    "browser": "chrome firefox safari edge opera",
    "programming": """
        python java javascript typescript ruby rust go perl php swift kotlin scala haskell matlab julia c
        sql html css bash lua fortran cobol
    """,
    "release": "alpha beta nightly stable final/release draft preview",
    "edition": "free basic standard pro premium enterprise ultimate deluxe lite mini max",
    "generation": "old/previous/legacy/former current/latest/newest/new next/upcoming/future original",
    "database": "mysql postgres/postgresql sqlite mongodb redis oracle mariadb cassandra elasticsearch",
    "framework": "react angular vue django flask rails spring laravel express svelte",
    "format": "pdf csv json xml yaml html docx word excel png jpeg/jpg gif mp3 mp4 zip txt markdown latex",
    "structure": """
        list array dictionary/dict tuple set string integer/int float boolean/bool object class function
        file
    """,
    "company": """
        google microsoft apple amazon facebook/meta twitter netflix tesla samsung sony ibm intel nvidia amd
        uber airbnb spotify walmart target starbucks ikea ebay instagram whatsapp telegram youtube tiktok
        linkedin
    """,
    "element": """
        hydrogen helium lithium carbon nitrogen oxygen sodium aluminum/aluminium silicon sulfur chlorine
        iron copper zinc silver tin gold mercury lead uranium nickel platinum titanium neon
    """,
    "shape": """
        circle square triangle rectangle sphere cube cylinder cone pyramid hexagon pentagon ellipse
        trapezoid
    """,
    "subject": """
        math/maths/mathematics physics chemistry biology history geography literature economics philosophy
        psychology sociology law medicine art music
    """,
    "job": """
        doctor nurse teacher lawyer engineer plumber electrician carpenter chef/cook waiter pilot driver
        farmer firefighter policeman soldier accountant dentist pharmacist architect journalist actor singer
        president senator governor mayor minister judge king queen prince princess pope ceo
    """,
    "direction": "north south east west left right straight",
    "clothes": """
        shirt trousers/pants jeans dress skirt jacket coat sweater shoe boot sock hat glove scarf tie belt
        suit
    """,
    "furniture": "chair table sofa/couch bed desk shelf/bookshelf wardrobe dresser cabinet mattress",
    "material": "wood metal plastic glass paper leather cotton wool silk stone concrete steel rubber",
    "weather": "rain snow wind storm hail fog thunder humidity sunshine",
    "document": """
        passport visa license/licence certificate resume/cv invoice receipt contract ticket will lease form
        warranty diploma prescription
    """,
    "account": "username password email address pin phone name photo/picture signature nickname",
    "media": """
        book movie/film song podcast album magazine newspaper poem novel essay story article letter speech
        joke
    """,
    "bill": "electricity electric gas water internet phone cable rent insurance tax",
    "religion": """
        christian christianity muslim islam jewish judaism hindu hinduism buddhist buddhism catholic
        protestant
    """,
    "gender": "male/man/men female/woman/women boy girl",
    "age": "baby/infant toddler teenager adult senior",
    "question": "who when where why",
    "edit": """
        delete/remove/erase create/add/make edit/change/modify/update rename copy move print save open close
        send share download upload restore archive cancel
    """,
    "order": "buy/purchase/order sell rent return exchange refund repair cancel track",
    "cooking": "bake boil fry grill roast steam microwave freeze thaw",
    "write": "summarize/summarise translate rewrite/rephrase/paraphrase explain proofread",
    "growth": "cause symptom treatment/cure prevention diagnosis",
    "comparison": """
        faster slower cheaper bigger/larger smaller longer shorter heavier lighter stronger weaker older
        younger
    """,
    "process": "sort filter reverse shuffle merge split encrypt compress parse",
}

_SPECIFYING = (
    *("language", "programming", "system", "format", "country", "city", "browser", "database", "framework"),
    *("month", "weekday", "holiday", "season", "planet", "continent"),
)
_AMBIGUOUS = frozenset(
    (
        *(
            "us",
            "go",
            "swift",
            "rust",
            "c",
            "ruby",
            "julia",
            "word",
            "zip",
            "edge",
            "opera",
            "turkey",
            "may",
            "march",
        ),
        *(
            "fall",
            "spring",
            "rails",
            "express",
            "oracle",
            "sun",
            "us",
            "phoenix",
            "flask",
            "georgia",
            "chile",
            "set",
        ),
    )
)
"""Words with another common meaning, of which a single one proves nothing."""

DONE = frozenset(
    """
    made built caused led won sold bought paid kept held hit cut put sent taught caught fought brought sought read fed
    hurt shot told lost spent lent bent sung struck said heard felt dealt meant found bound wound understood bit
    """.split()  # noqa: SIM905
)
"""Participles without the ending of one."""

SPECIFYING = {
    spelling: name
    for name in _SPECIFYING
    for member in _CLASSES[name].split()
    for spelling in member.split("/")
    if spelling not in _AMBIGUOUS
}
"""Words that narrow a question, with their classes: "in French", "on Linux", "for Easter"."""

_SYNONYMS = """
    buy/purchase begin/start/commence end/finish/terminate big/large/huge small/little/tiny fix/repair/mend
    fix/solve/resolve make/create/build create/generate/produce make/prepare/cook delete/remove/erase
    change/modify/update/edit/alter help/assist/aid/support show/display/give see/view/check see/find
    list/show/display/name explain/describe/clarify/define mean/definition/meaning/stand
    error/issue/problem/trouble/bug fast/quick/quickly/rapidly cheap/affordable/inexpensive best/top/greatest
    good/great best/recommend/good cost/price/expensive/much cost/charge cost/fee pay/spend salary/pay/wage
    work/job/employment job/occupation movie/film car/vehicle/auto/automobile phone/smartphone/mobile/cellphone/cell
    photo/picture/image doctor/physician child/kid/children/kids company/business/firm home/house apartment/flat
    holiday/vacation trip/travel flight/fly airplane/plane reserve/book/reservation/booking cancel/stop
    account/profile password/passcode login/signin/sign/log/access register/signup/enroll/join/create
    contact/reach/call talk/speak text/message/sms mail/email/e-mail important/significant/essential/crucial lose/shed
    reduce/decrease increase/raise/boost improve/better/boost grow/increase way/method/manner/approach/steps/step
    learn/study answer/reply/response/respond question/query/ask difference/differ/different/distinguish/compare
    famous/well-known/known common/frequent/usual/typical reason/cause/why result/effect/outcome/consequence
    happen/occur/take use/utilize work/function sick/ill illness/disease/sickness weight/heavy height/tall/high
    age/old length/long distance/far time/clock time/duration amount/quantity/number/much/many weather/forecast
    rain/rainy/raining cold/cool/chilly story/tale song/track/music/tune transfer/send/wire transfer/move
    money/fund/funds tip/advice/suggestion/recommendation idea/suggestion/thought alarm/wake set/create set/adjust
    restaurant/eatery/place/diner healthy/nutritious beautiful/pretty/nice smart/intelligent/clever
    funny/humorous/hilarious sad/unhappy/depressed happy/glad angry/mad scared/afraid tired/sleepy rich/wealthy
    quit/resign refund/back return/back ship/deliver/delivery/shipping/shipment package/parcel location/place/situated
    city/town country/nation area/region near/nearby/close program/programme/software/app/application code/script
    website/site/page/webpage internet/online web/online wifi/wireless install/setup/set configure/setup/set
    remember/recall/memorize forget/forgot/forgotten/lost recover/restore/retrieve/regain get/obtain/receive/acquire
    choose/select/pick/decide prove/show/demonstrate calculate/compute/figure/work convert/turn/change/transform
    translate/say summarize/summary/summarise/outline shorten/abbreviate write/compose/draft author/writer/wrote/write
    invent/inventor population/inhabitant birthday/birthdate born/birth die/death/dead marry/married/wedding
    war/conflict fight/battle law/rule person/people/individual/someone woman/lady man/guy friend/buddy boss/manager
    employee/worker/staff student/pupil teacher/instructor school/college/university lesson/class/course exam/test
    homework/assignment tv/television show/series game/match win/victory player/athlete insomnia/asleep
    exercise/workout/train/training gym/fitness hurt/ache/sore medicine/drug/medication/pill
    cure/treat/treatment/heal/remedy/rid/relieve prevent/avoid/stop safe/secure/safety dangerous/unsafe danger/risk
    protect/guard/secure true/real/actual/genuine/really fake/false wrong/incorrect right/correct sure/certain
    allow/let/permit/possible/can able/can/possible require/need/necessary/must/requirement want/like
    think/believe/opinion/feel/thought view/opinion know/aware tell/say/inform/give explain/tell/help latest/recent
    modern/current/contemporary old/ancient main/primary/major/key/chief whole/entire/all part/component part/section
    type/kind/sort example/instance/sample benefit/advantage/pros drawback/disadvantage/cons/downside
    quickly/fast/rapidly easily/easy/simple/simply/best difficult/hard/tough interesting/fun/cool/exciting
    several/multiple average/typical maximum/max/limit largest/biggest highest/maximum minimum/min lowest/minimum
    limit/cap/maximum/restriction due/owe/deadline bill/invoice card/creditcard expire/expiration/expiry
    activate/enable/start deactivate/disable/close block/freeze block/stop stolen/theft/stole/steal/thief
    lost/missing/misplace/misplaced/lose fraud/scam/fraudulent/suspicious transaction/payment convert/conversion
    currency/money point/reward/rewards insurance/coverage/cover tax/taxes rental/rent park/parking gas/fuel/petrol
    mileage/mpg/consumption tire/tyre traffic/congestion direction/directions/route/way/get airport/airline
    luggage/baggage/suitcase hotel/accommodation plug/adapter/converter vaccine/shot/vaccination timezone/zone
    date/day meeting/appointment schedule/agenda/calendar/plan remind/reminder/remember todo/task list/do volume/sound
    speaker/voice  update/version hi/hello/hey/greet name/call/called joke/funny/laugh coin/flip
    dice/die/roll robot/bot build/construct/assemble eliminate/rid/remove submit/file/send symptom/sign
    aim/goal/objective/purpose/target mistake/error tired/exhausted/sleepy richest/wealthiest calm/relaxed
    slow/sluggish old/vintage/antique tidy/neat/clean hide/conceal attempt/try buy/acquire close/shut finish/complete
    hard/challenging huge/enormous/giant silent/quiet wealth/fortune discount/coupon/deal ill/unwell gift/present
    road/street kid/youngster physician/doctor/gp attorney/lawyer jog/run fall/drop rapid/fast odor/smell/scent
    error/fault assure/ensure/guarantee shop/store film/video rubbish/garbage/trash lorry/truck lift/elevator
    flat/apartment biscuit/cookie pavement/sidewalk autumn/fall chips/fries crisps/chips headmaster/principal
    tasty/delicious brave/courageous begin/launch collect/gather locate/find permit/license/licence annual/yearly
    vacant/empty consult/see accommodation/lodging cheap/inexpensive/budget short/brief often/frequently/regularly
    recommend/suggest/propose ill/sick/unwell strong/secure stop/quit exit/quit start/launch/found enough/sufficient
    deep/depth big/size/large wide/width fastest/quickest pc/computer lower/reduce/cut weigh/weight/heavy remove/out
    wifi/wi climate/weather edible/eat majority/most usual/usually/typical several/some define/definition/explain
    raise/up contact/touch/reach speak/spoken ok/okay onto/to toward/to prior/before tap/faucet leak/drip nappy/diaper
    infant/newborn/baby notebook/laptop mac/macos macintosh/mac lead/leash bin/discard toilet/loo restroom/toilet
    mobile/phone housemate/flatmate/roommate fiddle/violin soothe/calm vibrate/shake punctured/flat squeak/squeaky
    veggie/vegetable postpone/delay/defer unclog/unblock blocked/clogged erase/wipe revert/undo rollback/undo
    sink/sunk construct/build construct/built written/write spoken/speak sell/sale made/make taken/take given/give
    broken/break chosen/choose driven/drive eaten/eat fallen/fall grown/grow known/know risen/rise seen/see
    stolen/steal thrown/throw worn/wear frozen/freeze dead/die stung/sting become/get become/turn spaceship/spacecraft
    adult/adults dishwasher/dishwashing solicitor/lawyer/attorney police/cop/cops sidewalk/pavement nyc/newyork
    uk/britain/british usa/america/american/us equitable/fair fairly/fair sack/fire/dismiss warm/heat folder/directory
    content/everything reverse/invert test/check/verify contain/exist/have contain/include carpet/rug enable/setup
    configure/setup activate/setup unsubscribe/cancel subscription/subscribe postal/mail renew/renewal yearly/annual
    cheapest/lowest oldest/eldest favorite/favourite/prefer hobby/fun/pastime color/colour gray/grey center/centre
    theater/theatre season/time
"""
_RELATED = """
    buy/purchase/order/get end/finish/stop/terminate fix/repair/mend/solve/resolve
    make/create/build/generate/produce/prepare/cook delete/remove/erase/clear/drop
    change/modify/update/edit/alter/switch show/display/see/view/check/look/find/give
    fast/quick/quickly/rapidly/speed/soon pay/spend salary/income/pay/wage/earn work/job/career/occupation/employment
    holiday/vacation/trip/travel flight/plane/fly reserve/book/reservation/booking/schedule cancel/undo/stop
    password/passcode/credential contact/reach/call/talk/speak lose/drop/reduce/decrease/shed learn/study/understand
    popular/famous/well-known/known use/utilize/employ/apply/work work/function/operate/run
    time/clock/hour/duration/long weather/forecast/temperature/climate rain/rainy/raining/umbrella hot/warm
    transfer/send/move/wire set/create/put eat/food food/meal recipe/make/cook/prepare ingredient/need/recipe
    quit/leave/resign location/place/where/address/situated area/region/place near/nearby/close/around
    code/program/script wifi/wireless wireless/network recover/reset/restore/retrieve/regain translate/say/convert
    population/people/inhabitant/live born/birth/birthday/birthdate die/death/dead/pass marry/married/wedding/spouse
    fight/battle law/legal/rule homework/assignment show/series/program sleep/rest/bed fat/belly dangerous/unsafe
    danger/dangerous/risk/risky right/correct/proper want/would/like/love new/latest/recent old/ancient
    part/piece/component/section type/kind/sort/form several/many/multiple/few average/mean/typical
    maximum/max/highest/most/largest/biggest/limit minimum/min/lowest/least block/freeze/stop
    hotel/motel/accommodation/stay date/day/calendar volume/loud/sound/quiet play/listen/hear battery/charge/power
    mistake/error vacant/empty/free strong/secure exit/quit/leave gain/build  lead/leash become/turn
    expire/run
"""
"""Groups of words that can stand for each other in some texts, but not where all else is equal."""

NEUTRAL_WORDS = frozenset(
    """
    able actually again already another answer anything ask asking available basically best bit case
    certain come cool correctly curious current currently detail details different easily easy even ever
    exactly explain few find finding give go good great happen help helping info information keep kind
    let look looking lot lots make making many maybe mine more most much need needed nice now okay order
    other others particular people perhaps person possible possibly pretty process proper properly put
    question quick quickly quite really require required right same say says see show simple simply
    someone something sort specific start step steps still stuff sure take thing time times try trying
    type use used using various way wonder wondering work works yet yours
    """.split()  # noqa: SIM905 (a list of lines of strings is no better to read)
)
"""Words that carry little of a question's meaning: one text may have them and the other not."""

NAMING_WORDS = frozenset(
    """
    name number word term title file package command program app application tool page city country year date place
    person team company worth allowed permitted offer located lies contain excuse mind kindly hi hello hey thanks
    thank please procedure method task reason run against cause define suggest weather forecast mean meaning status
    called code website sauce total anyway exist
    """.split()  # noqa: SIM905 (a list of lines of strings is no better to read)
)
"""Words that say of what kind something is, or only ask for it: a text means the same without them."""


def _stems(word: str) -> frozenset[str]:
    """A word, and what `stem` makes of its forms: crude stems of them may differ."""
    return frozenset({word, *map(stem, (word, f"{word}s", f"{word}ing"))})


_PREFIXES = _words("kilo mega giga tera milli micro nano centi")
_BASES = _words(
    "byte bit watt volt ampere hertz meter/metre gram liter/litre joule calorie pascal pixel second"
)


def _units() -> str:
    """Units with a prefix: megabytes and megabits look alike, and are none of each other's spellings."""
    return " ".join(
        "/".join(prefix + spelling for spelling in base.split("/")) for prefix in _PREFIXES for base in _BASES
    )


def _by_word() -> dict[str, dict[str, str]]:
    """For each stem its classes, and in each the stem that stands for all spellings of its member."""
    found: dict[str, dict[str, str]] = {}
    for name, text in (*_CLASSES.items(), ("unit", _units())):
        for member in text.split():
            spellings = member.split("/")
            for each in spellings:
                for word in _stems(each):
                    found.setdefault(word, {})[name] = stem(spellings[0])
    return found


def _groups(text: str) -> dict[str, frozenset[int]]:
    found: dict[str, set[int]] = {}
    for number, group in enumerate(text.split()):
        for each in group.split("/"):
            for word in _stems(each):
                found.setdefault(word, set()).add(number)
    return {word: frozenset(numbers) for word, numbers in found.items()}


CLASSES = _by_word()
"""Stems, and their classes; equal members of a class have one spelling in it."""

PROPER = frozenset(
    word
    for word in map(stem, SPECIFYING)
    if word != "polish" and CLASSES[word].keys() <= {*_SPECIFYING, "cuisine"}
)
"""Names that are no other word too, however they are written: no Mercury, no Polish."""

_SYNONYM_GROUPS = _groups(_SYNONYMS)
_RELATED_GROUPS = _groups(_RELATED)
NAMING = frozenset(each for word in NAMING_WORDS for each in _stems(word))
NEUTRAL = frozenset(each for word in NEUTRAL_WORDS for each in _stems(word))


def same_class(one: str, other: str) -> bool:
    """Whether two stems are different members of a class."""
    ours, theirs = CLASSES.get(one), CLASSES.get(other)
    if not ours or not theirs:
        return False
    return any(ours[name] != theirs[name] for name in ours.keys() & theirs.keys())


def akin(one: str, other: str) -> bool:
    """Whether two words or stems are listed as synonyms, or as spellings of one thing."""
    if not _SYNONYM_GROUPS.get(one, frozenset()).isdisjoint(_SYNONYM_GROUPS.get(other, frozenset())):
        return True
    ours, theirs = CLASSES.get(one, {}), CLASSES.get(other, {})
    return any(ours[name] == theirs[name] for name in ours.keys() & theirs.keys())


def same_meaning(one: str, other: str) -> bool:
    """Whether two stems can stand for each other: synonyms, or forms of one word."""
    if akin(one, other) or not _RELATED_GROUPS.get(one, frozenset()).isdisjoint(
        _RELATED_GROUPS.get(other, frozenset())
    ):
        return True
    ours, theirs = CLASSES.get(one, {}), CLASSES.get(other, {})
    if ours.keys() & theirs.keys():  # different members: "mother" and "motherinlaw"
        return False
    return min(len(one), len(other)) >= 4 and one_word(one, other)


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
