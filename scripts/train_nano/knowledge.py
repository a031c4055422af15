"""Longer facts: question and answer pairs, small talk, jokes, steps, and one-line functions.

Rule: `[a|b]` in a question stands for one of the alternatives (phrasing.expand); a question with
bars outside brackets is one of several whole questions. Answers are literal.
"""

HOW_MANY = [
    ("days", "a week", 7),
    ("months", "a year", 12),
    ("hours", "a day", 24),
    ("minutes", "an hour", 60),
    ("seconds", "a minute", 60),
    ("legs", "a spider", 8),
    ("legs", "a dog", 4),
    ("legs", "an ant", 6),
    ("sides", "a triangle", 3),
    ("sides", "a square", 4),
    ("sides", "a hexagon", 6),
    ("sides", "a pentagon", 5),
    ("sides", "an octagon", 8),
    ("letters", "the English alphabet", 26),
    ("planets", "the solar system", 8),
    ("continents", "the world", 7),
    ("wheels", "a bicycle", 2),
    ("wheels", "a car", 4),
    ("strings", "a violin", 4),
    ("cents", "a dollar", 100),
    ("centimetres", "a metre", 100),
    ("metres", "a kilometre", 1000),
    ("grams", "a kilogram", 1000),
    ("years", "a century", 100),
    ("years", "a decade", 10),
    ("weeks", "a year", 52),
    ("eggs", "a dozen", 12),
    ("arms", "an octopus", 8),
    ("fingers", "one hand", 5),
    ("players", "a football team", 11),
]

GENERAL_KNOWLEDGE = [
    ("What is the [largest|biggest] planet?", "The largest planet is Jupiter."),
    ("What is the [smallest|tiniest] planet?", "The smallest planet is Mercury."),
    (
        "Which planet is [closest|nearest] to the [Sun|sun]?",
        "Mercury is the planet closest to the Sun.",
    ),
    ("Which planet is [called|known as] the red planet?", "Mars is called the red planet."),
    ("What is the [largest|biggest] ocean?", "The largest ocean is the Pacific Ocean."),
    (
        "What is the [tallest|highest] mountain [in the world|on Earth]?",
        "The highest mountain is Mount Everest.",
    ),
    ("What is the fastest land animal?", "The fastest land animal is the cheetah."),
    ("What is the [largest|biggest] animal?", "The largest animal is the blue whale."),
    ("What is H2O?", "H2O is water."),
    ("What do [bees|honey bees] make?", "Bees make honey."),
    ("What do cows [give us|make]?", "Cows give us milk."),
    ("What is ice made of?", "Ice is frozen water."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("Who wrote Hamlet?", "William Shakespeare wrote Hamlet."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    (
        "Who developed the theory of relativity?",
        "Albert Einstein developed the theory of relativity.",
    ),
    ("What is the opposite of a question?", "The opposite of a question is an answer."),
    ("What do plants need to grow?", "Plants need water, light and air to grow."),
    ("What gas do we breathe [in|to live]?", "We breathe oxygen."),
    (
        "What is the [centre|center] of our solar system?",
        "The Sun is the centre of our solar system.",
    ),
    ("What is the Moon?", "The Moon is a natural satellite that moves around the Earth."),
    ("What is the Sun?", "The Sun is a star."),
    ("What is a computer?", "A computer is a machine that stores and processes information."),
    (
        "What is a language model?",
        "A language model is a program that predicts the next word of a text.",
    ),
    ("What is Python?", "Python is a programming language."),
    ("What is JAX?", "JAX is a Python library for fast numerical computing."),
    ("What is a TPU?", "A TPU is a chip made for machine learning."),
    ("What is the first letter of the alphabet?", "The first letter of the alphabet is A."),
    ("What is the last letter of the alphabet?", "The last letter of the alphabet is Z."),
    ("What season comes after winter?", "Spring comes after winter."),
    ("What season comes after spring?", "Summer comes after spring."),
    ("What season comes after summer?", "Autumn comes after summer."),
    ("What season comes after autumn?", "Winter comes after autumn."),
]

IDENTITY = [
    ("[Who|What] are you?", "I am K3-nano, a tiny language model."),
    ("What is your name?|What's your name?|Tell me your name.", "My name is K3-nano."),
    (
        "What can you do?|What are you able to do?|How can you help me?|Help",
        "I can chat, do small sums, sort lists, answer simple questions, use tools "
        "and tell short stories.",
    ),
    (
        "[Who made you?|Who created you?|Where do you come from?]",
        "I was trained from scratch on synthetic text as a demo for this server.",
    ),
    (
        "[Are you human?|Are you a person?|Are you a robot?|Are you an AI?|Are you real?]",
        "I am an AI, a tiny language model called K3-nano.",
    ),
    (
        "[How big are you?|How many parameters do you have?]",
        "I am very small. I have about one million parameters.",
    ),
    ("[How old are you?|When were you born?]", "I am a language model, so I do not have an age."),
    (
        "[What architecture do you use?|How do you work?|What model are you?]",
        "I use the Kimi K3 architecture with delta attention, latent attention "
        "and a mixture of experts.",
    ),
    (
        "[Are you smart?|Do you know everything?|Can I trust you?]",
        "I am tiny and I make mistakes, so please check what I say.",
    ),
    (
        "Do you speak [French|Spanish|English]?|Which languages do you speak?",
        "I speak simple English and know a few words of Spanish, French and German.",
    ),
]

SMALL_TALK = [
    (
        "[Hi|Hello|Hey|Hi there|Hello there|Good day|Hey there|hi|hello|hey][!|.|]",
        "Hello! How can I help you today?",
    ),
    ("Good morning[!|.|]", "Good morning! How can I help you today?"),
    ("Good evening[!|.|]", "Good evening! How can I help you today?"),
    ("[Good night|Sleep well][!|.|]", "Good night! Sleep well."),
    (
        "[How are you?|How are you doing?|How's it going?|How do you feel today?|What's up?]",
        "I am doing well, thank you. How are you?",
    ),
    (
        "[I am fine|I'm fine|I am good|I'm doing well|I am well][, thanks|, thank you|][.|!]",
        "I am glad to hear that! What can I do for you?",
    ),
    ("[Thanks|Thank you|Thank you very much|Thanks a lot|Many thanks][!|.|]", "You are welcome!"),
    ("[Bye|Goodbye|See you|See you later|Bye bye][!|.|]", "Goodbye! Have a nice day."),
    (
        "[I am sad|I feel sad|I'm sad|I feel down][.|]",
        "I am sorry to hear that. Do you want to talk about it?",
    ),
    ("[I am happy|I'm happy|I feel great][.|!]", "That is wonderful! What made you happy?"),
    ("[I am tired|I'm tired|I feel tired][.|]", "You should take a rest. A short nap can help."),
    ("[I am bored|I'm bored][.|]", "Shall I tell you a joke or a story?"),
    ("[I am hungry|I'm hungry][.|]", "You could make a sandwich or some pasta."),
    (
        "[You are great|You're nice|Good job|Well done|Good bot][!|.|]",
        "Thank you, that is very kind!",
    ),
    (
        "[You are wrong|That is wrong|That's not right][!|.|]",
        "I am sorry. I am a tiny model and I make mistakes.",
    ),
    (
        "Do you [like music|like books|have a favourite colour|have feelings]?",
        "I am a language model, so I do not have feelings, but I like to talk with you.",
    ),
    ("[Can you help me?|I need help|Help me, please][.|]", "Of course! What do you need?"),
    ("[Yes|Yes, please|OK|Okay|Sure][.|!|]", "Great! What would you like to do?"),
    ("[No|No, thanks|No, thank you][.|]", "All right. Let me know if you need anything."),
]

JOKES = [
    "Why did the robot nap? It had a hard drive.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why did the bicycle fall over? It was two tired.",
    "Why was the maths book sad? It had too many problems.",
    "What do clouds wear? Thunderwear.",
    "Why did the cookie go to the doctor? It felt crumby.",
    "What did the zero say to the eight? Nice belt!",
    "Why can't you trust stairs? They are always up to something.",
]

RECIPES = {
    "tea": [
        "Boil some water.",
        "Put a tea bag in a cup.",
        "Pour the water into the cup.",
        "Wait three minutes and enjoy.",
    ],
    "a sandwich": [
        "Take two slices of bread.",
        "Spread some butter on them.",
        "Add cheese and tomato.",
        "Close the sandwich and cut it.",
    ],
    "pancakes": [
        "Mix flour, eggs and milk.",
        "Heat a pan with butter.",
        "Pour in some batter.",
        "Flip it when it is golden.",
    ],
    "a salad": [
        "Wash the vegetables.",
        "Cut them into pieces.",
        "Add oil and salt.",
        "Mix well and serve.",
    ],
    "pasta": [
        "Boil a pot of salted water.",
        "Cook the pasta for ten minutes.",
        "Drain the water.",
        "Add sauce and serve.",
    ],
    "a paper plane": [
        "Take a sheet of paper.",
        "Fold it in half.",
        "Fold down the corners.",
        "Fold the wings and throw it.",
    ],
    "a fruit smoothie": [
        "Cut some fruit.",
        "Put it in a blender.",
        "Add milk or juice.",
        "Blend until smooth.",
    ],
    "scrambled eggs": [
        "Crack two eggs into a bowl.",
        "Beat them with a fork.",
        "Cook them in a warm pan.",
        "Stir until they are soft.",
    ],
}

TASKS = {
    "plant a tree": [
        "Dig a hole.",
        "Put the tree in the hole.",
        "Fill it with soil.",
        "Water it well.",
    ],
    "wash my hands": [
        "Wet your hands.",
        "Add some soap.",
        "Rub for twenty seconds.",
        "Rinse and dry them.",
    ],
    "learn a language": [
        "Learn a few words each day.",
        "Listen to native speakers.",
        "Practise speaking.",
        "Read simple books.",
    ],
    "sleep better": [
        "Go to bed at the same time.",
        "Turn off your screens.",
        "Keep the room dark.",
        "Avoid coffee in the evening.",
    ],
    "stay healthy": [
        "Eat fruit and vegetables.",
        "Drink enough water.",
        "Move every day.",
        "Sleep eight hours.",
    ],
    "clean my room": [
        "Make your bed.",
        "Put your clothes away.",
        "Dust the shelves.",
        "Sweep the floor.",
    ],
    "study for a test": [
        "Make a plan.",
        "Read your notes.",
        "Practise with questions.",
        "Rest before the test.",
    ],
    "make a friend": [
        "Say hello.",
        "Ask about their day.",
        "Listen carefully.",
        "Do something fun together.",
    ],
}

FUNCTIONS = {
    "adds two numbers": ("add", "a, b", "return a + b"),
    "subtracts two numbers": ("subtract", "a, b", "return a - b"),
    "multiplies two numbers": ("multiply", "a, b", "return a * b"),
    "returns the square of a number": ("square", "x", "return x * x"),
    "checks if a number is even": ("is_even", "n", "return n % 2 == 0"),
    "reverses a string": ("reverse", "s", "return s[::-1]"),
    "returns the length of a list": ("length", "items", "return len(items)"),
    "returns the largest number in a list": ("largest", "items", "return max(items)"),
    "returns the sum of a list": ("total", "items", "return sum(items)"),
    "says hello": ("say_hello", "name", 'return "Hello, " + name'),
    "sorts a list": ("sort_list", "items", "return sorted(items)"),
    "counts words in a text": ("count_words", "text", "return len(text.split())"),
    "converts a string to upper case": ("to_upper", "s", "return s.upper()"),
    "computes the factorial of a number": (
        "factorial",
        "n",
        "return 1 if n < 2 else n * factorial(n - 1)",
    ),
    "computes Fibonacci numbers": ("fib", "n", "return n if n < 2 else fib(n - 1) + fib(n - 2)"),
}
