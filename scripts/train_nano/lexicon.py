"""Word lists and plain facts: the vocabulary of the whole curriculum.

Rule: only facts and everyday words, typed by hand for this project. Nothing is copied from a text.
"""


def _words(text: str) -> list[str]:
    return text.split()


def _list(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(",")]


def _pairs(text: str) -> dict[str, str]:
    """`key: value; key: value` over any number of lines."""
    items = (part.split(":") for part in " ".join(text.split()).split(";"))
    return {key.strip(): value.strip() for key, value in items}


def _opposites(text: str) -> list[tuple[str, str]]:
    return [(first, second) for first, _, second in (p.partition("/") for p in text.split())]


CAPITALS = _pairs(
    """
    France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Greece: Athens;
    Poland: Warsaw; Austria: Vienna; Hungary: Budapest; Sweden: Stockholm; Norway: Oslo; Denmark:
    Copenhagen; Finland: Helsinki; Ireland: Dublin; Belgium: Brussels; Netherlands: Amsterdam;
    Switzerland: Bern; Russia: Moscow; Ukraine: Kyiv; Turkey: Ankara; Egypt: Cairo; Kenya:
    Nairobi; Nigeria: Abuja; Morocco: Rabat; Ethiopia: Addis Ababa; Ghana: Accra; Japan: Tokyo;
    China: Beijing; India: New Delhi; Thailand: Bangkok; Vietnam: Hanoi; Indonesia: Jakarta;
    Philippines: Manila; Malaysia: Kuala Lumpur; Nepal: Kathmandu; Pakistan: Islamabad; Iran:
    Tehran; Iraq: Baghdad; Israel: Jerusalem; Canada: Ottawa; Mexico: Mexico City; Cuba: Havana;
    Brazil: Brasilia; Argentina: Buenos Aires; Chile: Santiago; Peru: Lima; Colombia: Bogota;
    Venezuela: Caracas; Ecuador: Quito; Uruguay: Montevideo; Australia: Canberra; Iceland:
    Reykjavik; Romania: Bucharest; Bulgaria: Sofia; Croatia: Zagreb; Serbia: Belgrade; South
    Korea: Seoul; New Zealand: Wellington; the United Kingdom: London; the United States:
    Washington
    """
)

CONTINENTS = {
    "Europe": _words(
        "France Germany Italy Spain Portugal Greece Poland Austria Hungary Sweden Norway "
        "Denmark Finland Ireland Belgium Netherlands Switzerland Ukraine Iceland Romania "
        "Bulgaria Croatia Serbia"
    ),
    "Africa": _words("Egypt Kenya Nigeria Morocco Ethiopia Ghana"),
    "Asia": _words(
        "Japan China India Thailand Vietnam Indonesia Philippines Malaysia Nepal Pakistan Iran "
        "Iraq Israel"
    ),
    "South America": _words("Brazil Argentina Chile Peru Colombia Venezuela Ecuador Uruguay"),
    "North America": _words("Canada Mexico Cuba"),
}

ELEMENTS = _pairs(
    """
    hydrogen: H; helium: He; lithium: Li; carbon: C; nitrogen: N; oxygen: O; fluorine: F; neon:
    Ne; sodium: Na; magnesium: Mg; aluminium: Al; silicon: Si; phosphorus: P; sulfur: S; chlorine:
    Cl; argon: Ar; potassium: K; calcium: Ca; titanium: Ti; chromium: Cr; iron: Fe; cobalt: Co;
    nickel: Ni; copper: Cu; zinc: Zn; silver: Ag; tin: Sn; iodine: I; platinum: Pt; gold: Au;
    mercury: Hg; lead: Pb; uranium: U
    """
)

MONTHS = _words(
    """
    January February March April May June July August September October November December
    """
)

DAYS = _words(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)

PLANETS = _words(
    """
    Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune
    """
)

SOUNDS = _pairs(
    """
    dog: woof; cat: meow; cow: moo; sheep: baa; duck: quack; pig: oink; horse: neigh; lion: roar;
    frog: ribbit; bee: buzz; owl: hoot; snake: hiss; mouse: squeak; wolf: howl; rooster:
    cock-a-doodle-doo; crow: caw; donkey: hee-haw; bird: tweet
    """
)

COLOURS = _pairs(
    """
    grass: green; sky: blue; snow: white; coal: black; banana: yellow; lemon: yellow; tomato: red;
    strawberry: red; carrot: orange; pumpkin: orange; milk: white; blood: red; night: black;
    sunflower: yellow; frog: green; sea: blue; chocolate: brown; plum: purple; cherry: red; leaf:
    green; eggplant: purple; flamingo: pink; pig: pink; cloud: white; mud: brown
    """
)

# Both directions are asked; the first pair that holds a word gives its opposite.

OPPOSITES = _opposites(
    """
    hot/cold big/small up/down left/right fast/slow day/night black/white good/bad happy/sad
    old/young open/closed full/empty hard/soft high/low early/late wet/dry light/dark rich/poor
    strong/weak long/short thick/thin near/far clean/dirty loud/quiet easy/difficult first/last
    inside/outside love/hate win/lose push/pull start/stop true/false begin/end buy/sell give/take
    come/go brave/afraid sweet/sour sharp/blunt wide/narrow deep/shallow heavy/light alive/dead
    safe/dangerous right/wrong smooth/rough north/south east/west always/never more/less
    above/below before/after laugh/cry friend/enemy
    """
)

IRREGULAR_PLURALS = _pairs(
    """
    child: children; man: men; woman: women; foot: feet; tooth: teeth; mouse: mice; goose: geese;
    person: people; sheep: sheep; fish: fish; leaf: leaves; knife: knives; wolf: wolves; life:
    lives; half: halves; ox: oxen; deer: deer; wife: wives
    """
)

IRREGULAR_PASTS = _pairs(
    """
    go: went; eat: ate; run: ran; see: saw; come: came; take: took; give: gave; write: wrote;
    sing: sang; swim: swam; drink: drank; think: thought; buy: bought; find: found; make: made;
    say: said; know: knew; fly: flew; sleep: slept; speak: spoke; begin: began; drive: drove;
    read: read; win: won; lose: lost; hold: held; tell: told; teach: taught; catch: caught; break:
    broke
    """
)

REGULAR_VERBS = _words(
    """
    walk jump play cook talk look work help clean paint wash open climb laugh wait want ask call
    learn start
    """
)

CATEGORIES = {
    "animal": _words(
        "dog cat cow horse lion tiger bear rabbit fox wolf mouse elephant monkey goat sheep "
        "duck owl frog whale shark penguin"
    ),
    "fruit": _words(
        "apple banana orange pear grape cherry plum peach mango lemon melon strawberry kiwi "
        "pineapple"
    ),
    "vegetable": _words(
        "carrot potato onion cabbage pea bean spinach broccoli pumpkin leek radish turnip"
    ),
    "vehicle": _words("car bus train bike plane boat truck ship tram rocket taxi"),
    "tool": _words("hammer saw drill wrench shovel rake axe chisel screwdriver"),
    "colour": _words("red blue green yellow purple orange pink brown black white gray"),
    "instrument": _words("piano guitar violin drum flute trumpet harp cello"),
    "sport": _words("football tennis golf hockey rugby cricket swimming boxing chess skiing"),
    "drink": _words("water tea coffee milk juice lemonade cocoa"),
    "furniture": _words("chair table bed sofa desk shelf lamp wardrobe"),
    "clothing": _words("shirt hat coat sock shoe glove scarf dress jacket"),
}

CATEGORY_PLURALS = _pairs(
    """
    animal: animals; fruit: fruits; vegetable: vegetables; vehicle: vehicles; tool: tools; colour:
    colours; instrument: instruments; sport: sports; drink: drinks; furniture: pieces of
    furniture; clothing: pieces of clothing
    """
)

_ABSTRACT = ("colour", "sport", "drink")
NOUNS = sorted(
    {word for kind, words in CATEGORIES.items() if kind not in _ABSTRACT for word in words}
    | set(
        _words(
            """
            house tree river mountain book pencil window door garden city road star moon sun cloud
            flower stone bridge boat key bottle box basket clock phone letter lamp candle ring
            crown map coin
            """
        )
    )
)

ADJECTIVES = _words(
    """
    big small red blue green old new happy sad brave kind shiny quiet clever tiny gentle funny
    lazy bright lonely curious hungry sleepy proud
    """
)

NAMES = _words(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa
    Sam Tina Uma Victor Wendy Xander Yara Zoe Tom Lucy Max Nina Oscar Ruby Theo Alice Bob Carol
    Dan Eva Frank Gina Hugo Ida Jon Kim Liam Maya Nora Omar Pia Ravi Sara Tara Ali Chen Yuki Ines
    Marco Lena Peter Maria John Sofia
    """
)

CITIES = sorted(set(CAPITALS.values())) + _words(
    """
    Chicago Boston Seattle Toronto Sydney Munich Milan Barcelona Mumbai Shanghai Osaka Dubai
    Geneva Lyon Porto Krakow Kyoto Houston Denver Austin
    """
)

FOODS = _words(
    """
    pizza pasta soup salad rice bread cake pancakes curry noodles sushi tacos cheese ice-cream
    honey cookies porridge
    """
)

HOBBIES = _words(
    """
    reading painting swimming cooking dancing singing hiking fishing drawing gardening cycling
    running chess photography knitting
    """
)

JOBS = _words(
    """
    teacher doctor farmer baker nurse pilot painter singer writer driver chef lawyer scientist
    gardener plumber carpenter
    """
)

FOREIGN_WORDS = {
    "Spanish": _pairs(
        """
        hello: hola; goodbye: adiós; cat: gato; dog: perro; house: casa; water: agua; book: libro;
        friend: amigo; thanks: gracias; red: rojo; blue: azul; one: uno; two: dos; three: tres;
        bread: pan; milk: leche; sun: sol; moon: luna; night: noche; day: día
        """
    ),
    "French": _pairs(
        """
        hello: bonjour; goodbye: au revoir; cat: chat; dog: chien; house: maison; water: eau; book:
        livre; friend: ami; thanks: merci; red: rouge; blue: bleu; one: un; two: deux; three: trois;
        bread: pain; milk: lait; sun: soleil; moon: lune; night: nuit; day: jour
        """
    ),
    "German": _pairs(
        """
        hello: hallo; goodbye: tschüss; cat: Katze; dog: Hund; house: Haus; water: Wasser; book:
        Buch; friend: Freund; thanks: danke; red: rot; blue: blau; one: eins; two: zwei; three:
        drei; bread: Brot; milk: Milch; sun: Sonne; moon: Mond; night: Nacht; day: Tag
        """
    ),
}
