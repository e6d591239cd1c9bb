"""Word lists for the synthetic corpus. All lists are written by hand for this project."""

from __future__ import annotations

import random


def words(text: str) -> list[str]:
    """Return the words of a line; those that have spaces themselves are set apart by ``|``."""
    return text.split("|") if "|" in text else text.split()


SHE_NAMES = words(
    "Mira Anna Lena Nora Ella Ruth Ida Clara Maya Sofia Lucy Emma Alice Zoe Hana Lily Rosa Vera Tess Olga Ada "
    "Grace Eva Julia Marie Sara Nina Iris Freya Leila Amina Priya Yuki Mei Ingrid Greta Holly Daisy Ivy Hazel "
    "Luna Stella Petra Dora Fiona Mara Lisa Sarah Emily Hannah Martha Agnes Nelly Mina Alma Vega Lotte "
    "Jane Kate Laura Molly Penny Rita Susan Tina Wendy Carla Bella Flora"
)
HE_NAMES = words(
    "Tom Ben Max Leo Oscar Hugo Felix Theo Jack Sam Noah Paul Otto Emil Karl Finn Liam Omar Ravi Kenji Ivan "
    "Pavel Bruno Marco Pablo Diego Henry Peter Simon Victor Walter Adam Bob Carl David Eric Frank George Harry "
    "Jonas Kurt Lars Milo Nils Oliver Pip Quinn Rufus Sven Toby Ugo Vito Will Yusuf Zack Alex John Mark Luke "
    "Oskar Anton Jim Joe Bill Fred James Robert Thomas Michael Daniel Arthur Edgar Albert Milan"
)
ONSETS = words(
    "b br c ch cl d dr f fl g gl gr h j k kr l m n p pl qu r s sh sk st t th tr v w x y z zh sn sp bl vr ph"
)
VOWELS = words("a a a e e e i i i o o o u u ai ea ee ou ia io y")
CODAS = words("n r l s m k t th x nd rn lo ra na ri ko va dor mir lia to sk ll ck b d ne")

GIRL_KINDS = ["girl", "princess", "queen", "woman"]
BOY_KINDS = ["boy", "prince", "king", "man"]
PEOPLE = words(
    "baker gardener sailor painter teacher farmer clockmaker inventor shepherd doctor musician fisher weaver "
    "potter pilot librarian knight wizard pirate miller carpenter cook student"
)
CREATURES = words(
    "fox cat dog rabbit bear mouse owl dragon robot hedgehog duck frog wolf lion elephant turtle squirrel crow "
    "horse goat penguin otter badger whale bee snail tiger monkey deer sheep ghost giant fairy"
)
TRAITS = words(
    "brave kind clever shy curious quiet cheerful patient gentle stubborn careful lonely honest proud lazy "
    "friendly hungry sleepy young old small tiny tall funny wise happy"
)
HOMES = words(
    "village|town|forest|valley|lighthouse|castle|cottage|farm|harbour|mill|tower|cabin|cave|city|garden|"
    "boat|hut|palace|bakery|treehouse"
)
PLACE_ADJ = words(
    "small quiet old green windy snowy sunny distant misty narrow busy wide silent golden hidden stony dark "
    "rainy warm cold"
)
PLACES = words(
    "forest|river|mountain|lake|meadow|cave|desert|island|hill|bridge|market|beach|swamp|valley|tower|ruin|"
    "garden|harbour|field|library|well|mill|orchard|waterfall|station|museum|school|castle"
)
COLOURS = words("red blue green yellow purple orange white black silver golden pink brown grey")
OBJECTS = words(
    "kite key lamp book map ring bell boat hat crown drum flute coat clock cup mirror box ball basket candle "
    "compass feather lantern coin scarf shell stone sword violin wheel ladder rope letter umbrella button glove "
    "spoon necklace telescope pencil"
)
ITEMS = words(
    "apples berries coins shells stones flowers feathers buttons eggs nuts pears leaves candles letters keys "
    "mushrooms cherries beads fish cakes plums lemons"
)
WEATHER = [
    "it was raining",
    "the sun was shining",
    "the wind was strong",
    "snow was falling",
    "the sky was grey",
    "a thick fog lay over the land",
    "the air was warm",
    "the clouds were low",
    "the morning was cold",
    "a rainbow stood in the sky",
]
TIMES = [
    "One morning",
    "One day",
    "One evening",
    "One night",
    "Early one day",
    "Late one afternoon",
    "On the first day of spring",
    "On a cold winter day",
    "One summer day",
    "On a Sunday",
    "One autumn morning",
]
FEELINGS = words("happy sad tired afraid proud excited worried calm hungry surprised angry grateful")
FOODS = words(
    "bread|soup|honey|cheese|apple pie|tea|rice|pancakes|porridge|cake|nuts|berries|fish stew|plums|hot milk"
)
SOUNDS = words("a whisper|a loud crack|a soft song|a strange hum|footsteps|a cry for help|a bell|laughter")
LESSONS = [
    "a kind word can open any door",
    "a friend is worth more than gold",
    "patience is stronger than force",
    "it is never too late to try again",
    "the smallest helper can do the greatest things",
    "home is where someone waits for you",
    "asking for help is also brave",
    "every road begins with one step",
    "a shared meal tastes better",
    "listening is a kind of courage",
    "good things grow slowly",
    "the truth makes the heart light",
]
CATEGORIES: dict[str, list[str]] = {  # a list goes round its category from anywhere: no item comes twice
    "animals": words(
        "cat dog horse rabbit fox bear wolf lion tiger elephant mouse deer sheep goat cow pig duck owl frog whale"
    ),
    "pets": words("dog cat rabbit hamster parrot goldfish turtle mouse canary"),
    "farm animals": words("cow pig sheep goat horse hen duck donkey goose"),
    "wild animals": words("lion tiger wolf bear elephant zebra giraffe monkey fox deer"),
    "fruits": words(
        "apple banana pear orange grape cherry lemon plum peach mango kiwi melon fig lime apricot"
    ),
    "vegetables": words(
        "carrot potato onion tomato pea bean cabbage spinach leek pumpkin radish beetroot garlic"
    ),
    "colours": words("red blue green yellow purple orange white black silver gold pink brown grey"),
    "birds": words("owl crow robin eagle swan duck sparrow hawk gull parrot stork heron pigeon"),
    "trees": words("oak pine birch maple willow beech elm cedar ash fir larch poplar"),
    "flowers": words("rose tulip daisy lily violet poppy iris orchid lotus sunflower daffodil"),
    "tools": words("hammer saw drill screwdriver wrench pliers axe chisel file shovel rake ladder"),
    "instruments": words("violin piano flute drum guitar trumpet harp cello clarinet organ oboe"),
    "countries": words(
        "France Germany Japan Brazil Canada Egypt India Kenya Norway Spain Italy Peru China Poland"
    ),
    "cities": words(
        "Paris London Tokyo Berlin Rome Madrid Cairo Lima Oslo Delhi Vienna Prague Lisbon Dublin"
    ),
    "planets": words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "continents": words("Africa|Asia|Europe|North America|South America|Australia|Antarctica"),
    "seasons": words("spring summer autumn winter"),
    "sports": words("football tennis swimming running rowing boxing skiing hockey golf cycling fencing"),
    "hobbies": words("reading painting cooking gardening singing dancing fishing knitting chess hiking"),
    "jobs": words("baker teacher doctor farmer pilot painter sailor nurse cook singer miller judge tailor"),
    "drinks": words("water tea coffee milk juice lemonade cocoa cider soda"),
    "foods": words("bread cheese soup rice pasta salad honey butter cake pie eggs noodles"),
    "desserts": words("cake|ice cream|pudding|apple pie|cookies|pancakes|chocolate|waffles"),
    "clothes": words("shirt coat hat scarf glove sock shoe dress skirt belt jacket sweater"),
    "insects": words("ant bee wasp beetle moth fly cricket butterfly ladybird dragonfly"),
    "fish": words("salmon trout cod tuna herring carp eel pike perch bass"),
    "shapes": words("circle square triangle rectangle oval star hexagon pentagon diamond cube"),
    "vehicles": words("car bus train bicycle boat ship tram truck plane scooter van"),
    "furniture": words("chair table bed sofa desk shelf lamp stool bench wardrobe cupboard"),
    "toys": words("ball doll kite puzzle train blocks teddy robot drum yo-yo"),
    "names": words("Anna Tom Mira Ben Lena Max Nora Leo Ella Oscar Ruth Hugo Ida Felix Clara"),
    "girls' names": words("Anna Mira Lena Nora Ella Ruth Ida Clara Maya Sofia Lucy Emma Alice"),
    "boys' names": words("Tom Ben Max Leo Oscar Hugo Felix Theo Jack Sam Noah Paul Otto"),
    "metals": words("iron gold silver copper tin lead zinc nickel aluminium"),
    "languages": words("English French German Spanish Italian Japanese Polish Dutch Greek Turkish"),
    "school subjects": words("mathematics history art music biology physics chemistry geography"),
    "programming languages": words("Python C Java Rust Go Ruby Haskell Lisp Perl Lua"),
    "body parts": words("head arm leg hand foot eye ear nose mouth knee elbow finger"),
    "rooms": words("kitchen bedroom bathroom hall cellar attic office pantry study garage"),
    "feelings": words("happiness sadness anger fear pride surprise calm joy hope love"),
    "adjectives": words("brave kind clever shy curious quiet cheerful patient gentle honest"),
    "verbs": words("run walk sing jump read write sleep eat laugh swim"),
    "words": words("river lamp story apple window garden bread cloud music stone"),
    "things": words("book lamp key chair cup clock pencil mirror ball spoon"),
    "buildings": words("house school church tower castle library museum station hospital barn"),
    "weather words": words("rain snow wind fog sun hail storm cloud frost thunder"),
    "things to pack": words("socks|a map|a torch|warm clothes|water|a book|a rope|some food|a coat|matches"),
}
ALIASES = {  # other names of categories
    "colours": words("colors|colours"),
    "jobs": words("professions|occupations"),
    "instruments": words("musical instruments"),
    "foods": words("things to eat|dishes|kinds of food"),
    "drinks": words("things to drink|beverages"),
    "clothes": words("pieces of clothing|things to wear|items of clothing"),
    "fish": words("kinds of fish|types of fish"),
    "furniture": words("pieces of furniture"),
    "fruits": words("kinds of fruit|pieces of fruit|fruit"),
    "trees": words("kinds of trees|types of trees"),
    "birds": words("kinds of birds|types of birds"),
    "feelings": words("emotions"),
    "things": words("objects|household items|random things"),
    "words": words("random words|English words|nouns"),
    "cities": words("capitals|big cities|European cities"),
    "vehicles": words("means of transport"),
}
NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
TOPICS = words(
    "quantum physics|the French Revolution|photosynthesis|taxes|the stock market|black holes|chess openings|"
    "climate change|the Roman Empire|football results|the weather tomorrow|politics|cryptography|medicine|"
    "the meaning of life|a legal contract|my computer|the latest news|machine learning|the speed of light|"
    "democracy|the immune system|philosophy|jazz|volcanoes|electric cars|the moon landing|inflation|DNA|"
    "Shakespeare|gravity|the Eiffel Tower|coffee prices|vaccines|marathon training|ancient Greece"
)
VERBS_PAST = words("saw took carried found painted lost hid sold bought cleaned liked kept wanted dropped")
ALL_WORDS = sorted(
    {w for ws in CATEGORIES.values() for w in ws if " " not in w}
    | set(OBJECTS)
    | set(ITEMS)
    | set(CREATURES)
    | set(PEOPLE)
    | set(TRAITS)
    | set(PLACES)
    | set(COLOURS)
    | set(FEELINGS)
    | set(VERBS_PAST)
    | set(words("the a and in on with under over is was very not for from some many"))
)
# Loose words for copying, so that copying is not tied to the words of the stories.
LOOSE_WORDS = words(
    "about above across act add after again age ago air all almost alone along already also always among angle "
    "answer any arrive art ask asked away back bad bag bake baked band bank bar barn base basic bath battle bay "
    "be became because become been before began begin behind below bend best better between beyond big bit bite "
    "blow board body bone born both bottle bottom bought bow branch brain break breakfast bright bring broken "
    "brother brought brush build building built burn bus busy but butterfly buy by call called came can car card "
    "care carry case catch cause chair chance change cheap check child children choose church circle clean clear "
    "climb climbed close cloth cloud coal coast code coffee come common cost could count country course cover "
    "crossed cry cut daily dance danced dark data date daughter dawn day dead deal dear decide deep did dinner "
    "dish do does done door down draw dream dress drink drive drop dry dust each early earth east easy eat edge "
    "eight either else empty end engine enjoy enough enter equal even evening ever every example eye face fact "
    "fail fair fall family far fast father fear feel fell felt fence few fight file fill final find fine finger "
    "finish fire first five fix flag flat flew floor flow fly follow food foot force forget form found four free "
    "fresh friend front full fun game gate gave get girl give glad glass go goes gold gone good grass great ground "
    "group grow guess had hair half hall hand hang hard has have he head hear heard heart heat heavy held hello "
    "help her here high him his hit hold hole holiday home hope hot hour house how huge hundred hurry ice idea "
    "if ill inside into iron is it its job join joke journey jump jumped jumps just keep kettle kitchen knew know "
    "ladder land language large last late laugh law lay lazy lead learn least leave left leg less lesson let life "
    "light like line list listen live long look loose lose lost lot loud love low lunch machine made mail main "
    "make man map mark market matter may me meal mean meat meet men met middle might mile milk mind minute miss "
    "mix model money month moon more morning most mother mouth move much music must my name near neck need never "
    "new news next nice night nine no noise none noon north nose note nothing now number oil older once one only "
    "open or order other our out outside own page paid pair paper park part party pass past path pay peace pen "
    "perhaps picnic picture piece pipe plan plane plant plate play played please plenty point poor port post pot "
    "pull push put question quick race radio rain ran reach reached read ready real red rest rice rich ride right "
    "rise road rock roll roof room root round row rule run sad safe said sail sailed salt same sand sang sat save "
    "saw say school sea seat second see seed seem seen self sell send sent serve set seven several shade shall "
    "shape share sharp she shelf shine ship shirt shoe shop short should shout show shut sick side sight sign "
    "silent silk simple since sing sister sit six size skin sky sleep slept slow slowly smell smile smoke smooth "
    "snow so soap soft soil sold son song soon sound south space speak speed spell spend spoke spot stand star "
    "start station stay step still stood stop store storm story straight strange street strong such sugar summer "
    "sure surprise sweet swim table tail take talk taste tea teach team teapot tell ten test than thank that "
    "their them then there these they thick thin thing think third this those thought thousand three threw "
    "through throw ticket till time tin tired to today together tomorrow tonight too top touch toward town toy "
    "train travel tree trip true trust try turn twice two uncle until up upon us use useful valley very view "
    "visit voice wait waited walk walked wall want war warm was wash watch water wave way we wear week weight "
    "well went were west wet what when where which while who whole why wife wild will win wind window winter "
    "wish with without woke woman wonder wood word wore work world worn worse would write wrote yard year yes "
    "yesterday yet you your zero"
)
ANY_WORDS = sorted({*ALL_WORDS, *LOOSE_WORDS})
ADJECTIVES = words(
    "red blue green old new small big quick slow lazy brown happy sad bright dark cold warm little long short "
    "quiet loud young white black yellow golden tall empty broken heavy soft wild strange pretty fine"
)
NOUNS = words(
    "boat mill dog cat fox house tree river road bird ship train car man woman girl boy child garden window door "
    "cup book lamp king queen horse moon sun star wind cloud field hill bridge town city school teacher farmer "
    "sailor baker letter song story picture table chair bread apple flower forest sea lake stone clock key"
)
VERBS = words(
    "sailed|walked|ran|jumped|flew|went|came|stood|slept|sang|danced|waited|sat|lived|played|fell|turned|looked"
)
PREPOSITIONS = words("past|over|under|near|behind|through|to|from|with|around|across|beside|in|on|into")
UNICODE_BITS = words(
    "Grüße aus Köln|naïve café|Ångström|¿Qué tal?|日本語|こんにちは|你好|Привет, мир|Γειά σου|שלום|مرحبا|안녕하세요|"  # noqa: RUF001
    "🙂|🚀✨|→|∑ x²|½ €|Łódź|çok güzel|ﬁn|🦊🐻"
)


def random_name(r: random.Random) -> str:
    """Return an invented, capitalised name of one to three syllables."""
    syllables = r.choice((1, 2, 2, 2, 3))
    name = "".join(r.choice(ONSETS) + r.choice(VOWELS) for _ in range(syllables))
    if syllables == 1 or r.random() < 0.7:
        name += r.choice(CODAS)
    return name.capitalize()


def article(word: str) -> str:
    """Return ``word`` with its indefinite article."""
    vowel = word[0].lower() in "aeiou" or word.startswith("honest")
    return f"{'an' if vowel else 'a'} {word}"
