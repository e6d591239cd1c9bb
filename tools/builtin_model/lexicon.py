"""Word lists for the synthetic corpus. All lists are written by hand for this project."""

from __future__ import annotations

import random


def words(text: str) -> list[str]:
    """Return the words of a line; those that have spaces themselves are set apart by ``|``."""
    return text.split("|") if "|" in text else text.split()


SHE_NAMES = words(
    "Mira Anna Lena Nora Ella Ruth Ida Clara Maya Sofia Lucy Emma Alice Zoe Hana Lily Rosa Vera Tess Olga Ada "
    "Grace Eva Julia Marie Sara Nina Iris Freya Leila Amina Priya Yuki Mei Ingrid Greta Holly Daisy Ivy Hazel "
    "Luna Stella Petra Dora Fiona Jane Kate Laura Molly Penny Rita Susan Tina Wendy Carla Bella Flora"
)
HE_NAMES = words(
    "Tom Ben Max Leo Oscar Hugo Felix Theo Jack Sam Noah Paul Otto Emil Karl Finn Liam Omar Ravi Kenji Ivan "
    "Pavel Bruno Marco Pablo Diego Henry Peter Simon Victor Walter Adam Bob Carl David Eric Frank George Harry "
    "Jonas Kurt Lars Milo Nils Oliver Pip Quinn Rufus Sven Toby Ugo Vito Will Yusuf Zack Alex John Mark Luke"
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
CATEGORIES: dict[str, list[str]] = {
    "animals": words(
        "cat dog horse rabbit fox bear wolf lion tiger elephant mouse deer sheep goat cow pig duck owl frog whale"
    ),
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
    "sports": words("football tennis swimming running rowing boxing skiing hockey golf cycling fencing"),
    "jobs": words("baker teacher doctor farmer pilot painter sailor nurse cook singer miller judge tailor"),
    "drinks": words("water tea coffee milk juice lemonade cocoa cider soda"),
    "foods": words("bread cheese soup rice pasta salad honey butter cake pie eggs noodles"),
    "clothes": words("shirt coat hat scarf glove sock shoe dress skirt belt jacket sweater"),
    "insects": words("ant bee wasp beetle moth fly cricket butterfly ladybird dragonfly"),
    "fish": words("salmon trout cod tuna herring carp eel pike perch bass"),
    "shapes": words("circle square triangle rectangle oval star hexagon pentagon diamond cube"),
    "vehicles": words("car bus train bicycle boat ship tram truck plane scooter van"),
    "furniture": words("chair table bed sofa desk shelf lamp stool bench wardrobe cupboard"),
    "names": words("Anna Tom Mira Ben Lena Max Nora Leo Ella Oscar Ruth Hugo Ida Felix Clara"),
    "metals": words("iron gold silver copper tin lead zinc nickel aluminium"),
    "school subjects": words("mathematics history art music biology physics chemistry geography"),
    "programming languages": words("Python C Java Rust Go Ruby Haskell Lisp Perl Lua"),
    "body parts": words("head arm leg hand foot eye ear nose mouth knee elbow finger"),
    "rooms": words("kitchen bedroom bathroom hall cellar attic office pantry study garage"),
    "weather words": words("rain snow wind fog sun hail storm cloud frost thunder"),
    "things to pack": words("socks|a map|a torch|warm clothes|water|a book|a rope|some food|a coat|matches"),
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
