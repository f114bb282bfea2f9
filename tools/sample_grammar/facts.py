"""What the bundled SQuAD sample tells of and asks for: invented subjects, their facts, and the words for both.

The lines of KINDS are read as

    * name | name                       another kind of subject, and what its subjects are called
    slot type: question | question      a fact, the table that its answer comes from, and ways to ask for it
    - sentence                          a way to tell one or more facts

`{it}` is the subject's name, in a sentence also "it"; `{slot}` is the answer, and `[...]` around a slot the longer span
that is a good answer too. Whoever adds a line keeps four promises:

1. a sentence settles the questions about the slots it names, and no others;
2. two slots of a kind are so different that an answer to one never answers the other;
3. the same sentence with another filler from the same table is still good English, and so it is with "it";
4. no question holds an answer, and no aside tells anything of a subject.
"""

import re
from dataclasses import dataclass

from sample_grammar.words import CITIES, PEOPLE


@dataclass(frozen=True)
class Kind:
    """One kind of subject: patterns for its names, slot -> type of answer, slot -> questions, and the sentences."""

    names: list[str]
    types: dict[str, str]
    questions: dict[str, list[str]]
    sentences: list[str]


def slots(sentence: str) -> list[str]:
    """The facts that a sentence tells."""
    return [name for name in re.findall(r"{(\w+)}", sentence) if name != "it"]


def with_pronoun(sentence: str) -> str:
    """The sentence with "it" and "its" for the subject's name."""
    sentence = re.sub(r"^The ([\w -]+) of {it}", r"Its \1", sentence)
    sentence = re.sub(r"\bthe ([\w -]+) of {it}", r"its \1", sentence)
    return sentence.replace("{it}", "it")


def _kinds(text: str) -> list[Kind]:
    kinds = []
    for line in (line.strip() for line in text.strip().splitlines()):
        if line.startswith("* "):
            kinds.append(Kind(line[2:].split(" | "), {}, {}, []))
        elif line.startswith("- "):
            kinds[-1].sentences.append(line[2:])
        else:
            slot, answer, asked = re.fullmatch(r"(\w+) (\w+): (.+)", line).groups()
            kinds[-1].types[slot] = answer
            kinds[-1].questions[slot] = asked.split(" | ")
    return kinds


def _list(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(";")]


# A letter with a combining mark is written as an escape: an editor would put the two together.
FIRST_SYLLABLES = _list(
    """Bran; Tor; Vel; Kes; Dun; Har; Ost; Lin; Sel; Grim; Fal; Cor; Wen; Ald; Ska; Pel; Rud; Tam; Hol; Fen; Mor; Sten;
    Gal; Quil; Brö; Žel; Ørs; Łan; Nér; Çal; Ülm; Jór; Té; Mår; Te\u0301l; Vo\u0308r"""
)
LAST_SYLLABLES = _list(
    """wick; mere; holt; stad; vik; ley; ford; gard; nitz; mund; bach; thorpe; ova; ingen; dale; esti; ara; burn; low;
    mark; sund; anne; úna; ény; øy; ovač; on\u0303o; erre"""
)
REGIONS = _list(
    """Upper Orlen; The Sørvik Coast; Lower Tamarra; The Vale of Quenby; Ostermark; The Isles of Fenn; Kárvia;
    The Dravna Basin; Western Halm; The Côte de Rêve; Pellando; The Marches of Ulm–Veda; The Skarre Peninsula; Zelenara;
    New Lindmoor; The Grünwald Plateau; Monte Cerro; The Bay of Añora; Eastern Tolvania; The Lakes of Rúna; Belmére"""
)
TABLES = {
    "person": [str(person) for person in PEOPLE],
    "city": [str(city) for city in CITIES],
    "year": [str(year) for year in range(1784, 1994, 3)],
    "money": [f"{sign}{sum_}" for sign in "£€$" for sum_ in _list("""
        3.4 million; 12 million; 1.75 million; 60,000; 780,000; 9,500; 245,000; 31 million; 18,200""")],
    "few": _list("14; 19; 23; 31; 36; 42; 48; 57; 64; 72; 88; 96; 110; 125; 140; 165"),
    "many": _list("230; 385; 470; 620; 815; 940; 1,250; 1,900; 2,400; 3,700; 5,600; 8,300; 12,000; 46,000"),
    "metres": [f"{number} metres" for number in (18, 27, 34, 46, 63, 85, 118, 152, 209, 334, 412, 575, 870)],
    "kilometres": [f"{number} kilometres" for number in (11, 19, 28, 37, 64, 95, 180, 320, 740, "1,300", "2,650")],
    "hectares": [f"{number} hectares" for number in (3, 7, 12, 16, 24, 31, 45, 58, 90)],
    "time": _list("""four days; nine days; two weeks; three weeks; six weeks; five hours; ten days; a day and a night;
        a week and a half; eleven hours"""),
    "season": _list("""the first week of May; late September; early December; early March; mid-August;
        the last days of June; the week after Easter; the middle of October; January"""),
    "group": _list("""the fishermen of the northern harbour; a league of local millers; the bishop and his canons; the
        widows of the old town; the owners of the ferries; a society for quiet streets; the farmers’ union; two noisy
        members of parliament; the students of the naval school; the guild of glass-blowers; the café owners"""),
    "material": _list("""red sandstone; white marble; oak and copper; wrought iron; grey granite; yellow brick; larch
        wood; black basalt; reinforced concrete; riveted steel; limestone and glass; cast iron"""),
    "find": _list("""a valley of hot springs; the ruins of a stone fort; an unknown species of blue heron; a lake below
        the ice; a pass through the mountains; the wreck of a Greek ship; a seam of pure silver; three uninhabited
        islands; a cave full of painted bison; a forest of petrified trees"""),
    "light": _list("""a faint comet with two tails; a ring around a small planet; a pair of dwarf stars; an exploding
        star; a cloud of cold dust; a moon no larger than a town; a double nebula; seven unknown asteroids"""),
    "goods": _list("""bicycle bells; paper lanterns; brass buttons; fountain pens; church organs; crème brûlée dishes;
        pocket compasses; sailcloth; enamel stoves; toy trains; rye crackers; umbrella handles; piano strings"""),
    "plant": _list("""a blue Himalayan poppy; a thousand-year-old olive tree; the dwarf fern of Réunion; a white orchid;
        a grove of paper mulberries; the last known silver lupin; a pear tree without thorns; a black tulip"""),
    "fuel": _list("whale oil; olive oil; paraffin; acetylene gas; coal; rapeseed oil; beech wood; peat"),
    "prize": _list("""a silver herring; a wheel of cheese; a crown of laurel; a bronze bell; an embroidered flag; a live
        goose; a barrel of cider; a golden spoon; a pair of red boots; a jar of honey"""),
    "work": _list("""Тихая вода; Δρόμος χωρίς τέλος; 春の川; Sous les tilleuls; The Miller’s Third Daughter; Η θάλασσα;
        Über den Dächern; Ночь над рекой; Salt and Bread; La última niña; 月と海; Psalm for Rain; Ljós í myrkri"""),
}  # fmt: skip

KINDS = _kinds(
    """
    * the {} Expedition | the {} Voyage | the {} Survey
    leader person: Who led {it}? | Who was in command of {it}? | Which explorer was at the head of {it}?
    patron person: Who paid for {it}? | Which patron gave the money for {it}? | Who was the sponsor of {it}?
    start city: From which city did {it} set out? | Where did {it} start? | In which port did {it} begin?
    year year: When did {it} set out? | In which year did {it} begin? | What year saw the start of {it}?
    distance kilometres: How far did {it} travel? | What distance did {it} cover?
    crew few: How many people took part in {it}? | How large was the crew of {it}?
    find find: What did {it} discover? | What was found by {it}?
    - Under the command of [the explorer {leader}], {it} set out from [the port of {start}] [in {year}].
    - {it} was led by {leader} – to the surprise of every newspaper.
    - The leader of {it} was [the retired captain {leader}].
    - The money for {it} came from [the banker {patron}], a man of few words.
    - {it} was paid for by {patron}, who never left home.
    - {it} left [the harbour of {start}] with [{crew} people] on board.
    - [In {year}], after long delays, {it} began at last in {start}.
    - {it} covered [about {distance}] before the snow came.
    - In the end {it} travelled [a total of {distance}] and discovered {find}.
    - We owe to {it} the discovery of {find}.
    - [No fewer than {crew} people] took part in {it}.
    * the {} Bridge | the {} Viaduct | the {} Crossing
    engineer person: Who designed {it}? | Which engineer drew the plans for {it}? | Who was the designer of {it}?
    opponent group: Who opposed {it}? | Who was against the building of {it}? | Who protested against {it}?
    opened year: When was {it} opened? | In which year did traffic first use {it}?
    repaired year: When was {it} repaired? | In which year was {it} restored?
    length metres: How long is {it}? | What is the length of {it}?
    material material: What is {it} made of? | Which material was used to build {it}?
    cost money: How much did {it} cost? | What was the price of {it}? | How much was paid for {it}?
    - Designed by [the engineer {engineer}], {it} was opened to traffic [in {opened}].
    - The plans for {it} were drawn by {engineer}, then a young engineer.
    - The first carts rolled over {it} [in {opened}], on the day it was opened.
    - {it} is [{length} long] and built of {material}.
    - Made of {material}, {it} has stood firm in every flood.
    - The length of {it} is [exactly {length}], as every child of the town knows.
    - {it} cost [more than {cost}], twice what had been planned.
    - The town paid [a sum of {cost}] for {it}, in eleven parts.
    - {opponent} protested against {it}, but in vain.
    - The building of {it} was opposed for years by {opponent}.
    - {it} was repaired [in {repaired}] after a flood.
    - After a fire, {it} was carefully restored [in {repaired}].
    * the {} Choir | the {} Chorus | the {} Vocal Ensemble
    founder person: Who founded {it}? | Who was the founder of {it}? | Which person brought {it} to life?
    conductor person: Who conducts {it} today? | Who is the present conductor of {it}?
    founded year: When was {it} founded? | In which year did {it} come into being?
    members few: How many singers does {it} have? | How many members sing in {it}?
    home city: Where does {it} rehearse? | In which city does {it} hold its rehearsals?
    song work: What is the best-known song of {it}? | Which song is {it} famous for?
    prize prize: What prize did {it} win? | What did the judges give {it}?
    - {it} was founded [in {founded}] by [the music teacher {founder}].
    - The founder of {it} was {founder}, who could not read music.
    - Since [the year {founded}], when it was founded, {it} has never missed a concert.
    - Today {it} is conducted by {conductor} – the fifth to hold the post.
    - The present conductor of {it} is [the organist {conductor}].
    - {it} has [{members} singers], most of them amateurs.
    - About [{members} members] sing in {it}, and every voice is tested twice a year.
    - {it} rehearses every Tuesday in an old cinema in {home}.
    - The rehearsals of {it} are held in [the city of {home}].
    - The best-known song of {it} is “{song}”, sung without instruments.
    - {it} became famous with [the song “{song}”].
    - The judges of a contest gave {it} {prize} as a prize.
    - {it} once won {prize} in a contest of twelve choirs.
    * the {} Observatory | the {} Star Tower | the {} Planetarium
    director person: Who was the first director of {it}? | Who was the first to direct {it}?
    donor person: Who gave the land for {it}? | Which landowner donated the ground of {it}?
    built year: When was {it} built? | In which year was the building of {it} completed?
    height metres: How high above the sea does {it} stand? | At what altitude is {it}?
    found light: What was discovered at {it}? | What did the astronomers of {it} discover?
    cost money: How much did the telescope of {it} cost? | What was the price of the telescope of {it}?
    staff few: How many people work at {it}? | How large is the staff of {it}?
    - Built [in {built}], {it} stands [{height} above the sea].
    - The building of {it} was completed [in {built}] after a hard winter.
    - The altitude of {it} is [about {height}], well above the fog.
    - The first director of {it} was [the astronomer {director}].
    - {it} was first directed by {director}, who slept by day.
    - The land for {it} was a gift from {donor}.
    - [The landowner {donor}] donated the ground on which {it} stands.
    - On a clear night, the astronomers of {it} discovered {found}.
    - {it} is known for the discovery of {found}.
    - The telescope of {it} cost [nearly {cost}], paid in silver.
    - A price of {cost} was paid for the telescope of {it}.
    - [Some {staff} people] work at {it}, half of them at night.
    - {it} has [a staff of {staff}], the cooks included.
    * {} & Sons | {} Works | {}’s Manufactory
    founder person: Who founded {it}? | Who started {it}? | By whom was {it} established?
    buyer person: Who bought {it}? | Which investor is the new owner of {it}? | To whom was {it} sold?
    founded year: When was {it} founded? | In which year was {it} established?
    seat city: Where is the head office of {it}? | In which city does {it} have its headquarters?
    product goods: What does {it} make? | What is manufactured by {it}? | Which product comes from {it}?
    workers many: How many workers does {it} employ? | How many people work for {it}?
    sales money: How much does {it} earn in a year? | What are the yearly sales of {it}?
    - {it} was founded [in {founded}] by [the watchmaker {founder}].
    - It was {founder} who started {it}, with a borrowed hammer.
    - The company register says that {it} was established [in {founded}].
    - The head office of {it} is in [the city of {seat}].
    - From its headquarters in {seat}, {it} sells to forty countries.
    - {it} makes {product}, as it always has.
    - In three halls {it} manufactures {product} for the whole continent.
    - {it} employs [{workers} workers], many of them part-time.
    - [Roughly {workers} people] work for {it}.
    - The yearly sales of {it} amount to [about {sales}].
    - {it} earns {sales} a year – before taxes.
    - After long talks, {it} was sold to [the investor {buyer}].
    - {it} was bought by {buyer}, the sixth owner.
    * the {} Festival | the {} Fair | the {} Games
    organiser person: Who organises {it}? | Who is the organiser of {it}? | Who is in charge of {it}?
    winner person: Who won the main contest of {it} last year? | Who was the last winner at {it}?
    first year: When was {it} held for the first time? | In which year did {it} first take place?
    season season: At what time of the year is {it} held? | When in the year does {it} take place?
    length time: How long does {it} last? | For how long does {it} go on?
    guests many: How many visitors come to {it}? | How many guests does {it} have?
    prize prize: What does the winner of {it} receive? | What is the prize at {it}?
    - {it} was held for the first time [in {first}], in a barn.
    - The chronicle says that {it} first took place [in {first}].
    - Every year {it} takes place in {season} and lasts {length}.
    - {it} is held in {season}, whatever the weather.
    - {it} goes on for [no less than {length}], nights included.
    - {it} is organised by [the innkeeper {organiser}].
    - The organiser of {it} is {organiser}, who also sells the tickets.
    - Last year the main contest of {it} was won by {winner}.
    - The last winner of {it} was {winner}, to great applause.
    - [About {guests} visitors] come to {it} every year.
    - {it} has [as many as {guests} guests], most of them from abroad.
    - The winner of {it} receives {prize}.
    - The prize of {it} is {prize}, handed over by the youngest child of the village.
    * the {} Light | the {} Lighthouse | the {} Beacon
    builder person: Who built {it}? | Which architect was the builder of {it}?
    keeper person: Who was the last keeper of {it}? | Who was the last to keep the lamp of {it}?
    lit year: When was {it} first lit? | In which year did {it} shine for the first time?
    height metres: How tall is {it}? | What is the height of {it}?
    reach kilometres: From how far away can {it} be seen? | How far does the light of {it} reach?
    fuel fuel: What did the lamp of {it} burn? | What fuel was used for the lamp of {it}?
    stone material: What are the walls of {it} made of? | Of which material are the walls of {it}?
    - Built by [the architect {builder}], {it} was first lit [in {lit}].
    - The builder of {it} was {builder}, a friend of sailors.
    - {it} shone for the first time [in {lit}] – on a night of fog.
    - The height of {it} is {height}, with a stair of iron.
    - {it} is [{height} tall] and can be seen from [{reach} away].
    - The light of {it} reaches [as far as {reach}] when the air is clear.
    - The last keeper of {it} was [the old sailor {keeper}].
    - {it} had nine keepers, the last of whom was {keeper}.
    - The lamp of {it} burned {fuel} in those days.
    - As fuel for its lamp, {it} used {fuel} from the very beginning.
    - The walls of {it} are made of {stone}.
    - {it} has thick walls of {stone}, painted every spring.
    * the {} Courier | the {} Gazette | the {} Herald
    editor person: Who edits {it}? | Who is the editor of {it}?
    founder person: Who founded {it}? | Which printer was the founder of {it}?
    first year: When did {it} first appear? | In which year was {it} printed for the first time?
    banned year: When was {it} banned? | In which year did the government forbid {it}?
    town city: Where is {it} printed? | In which city is the press of {it}?
    copies many: How many copies does {it} sell? | How many copies of {it} are sold?
    enemy group: Who took {it} to court? | Who brought a case against {it}?
    - Founded by [the printer {founder}], {it} first appeared [in {first}].
    - The founder of {it} was {founder}, who set every letter by hand.
    - {it} was printed for the first time [in {first}].
    - The government banned {it} [in {banned}] for eight weeks.
    - {it} was forbidden [in {banned}] because of a poem.
    - The editor of {it} is [the former teacher {editor}].
    - For some time now {it} has been edited by {editor}.
    - {it} is printed in {town}, on a press from another century.
    - The press of {it} stands in [the city of {town}].
    - {it} sells [{copies} copies] a day – more than ever.
    - [Some {copies} copies] of {it} are sold on a good day.
    - {enemy} took {it} to court over a cartoon.
    - In a famous case, {it} was taken to court by {enemy}.
    * the {} Garden | the {} Park | the {} Arboretum
    gardener person: Who laid out {it}? | Which gardener planned {it}? | Who drew the first plan of {it}?
    owner person: To whom does {it} belong? | Who is the owner of {it}? | Who owns {it}?
    opened year: When was {it} opened to the public? | Since which year has {it} been open to everybody?
    area hectares: How large is {it}? | What is the area of {it}?
    rarity plant: What is the rarest plant of {it}? | Which rare plant grows in {it}?
    fee money: How much does the upkeep of {it} cost? | What does it cost to maintain {it}?
    workers few: How many gardeners look after {it}? | How many gardeners work in {it}?
    - {it} was laid out by [the gardener {gardener}] and opened to the public [in {opened}].
    - The first plan of {it} was drawn by {gardener}, on the back of a letter.
    - Since [the year {opened}], {it} has been open to everybody.
    - {it} covers [an area of {area}] between two streams.
    - With its {area}, {it} is large enough to get lost in.
    - The rarest plant of {it} is {rarity}.
    - Behind a fence, {it} hides {rarity}, its rarest plant.
    - {it} belongs to {owner}, who lives next to the gate.
    - The owner of {it} is [the painter {owner}].
    - The upkeep of {it} costs [some {fee}] a year.
    - To maintain {it} costs {fee}, paid by the town.
    - [As many as {workers} gardeners] look after {it}.
    - {it} is tended by [{workers} gardeners], one for each path.
    """
)
ASIDES = [
    "“Nobody here forgets such things,” wrote {person} in a letter from {city}.",
    "A short play by {person} was first staged in {city} in {year}.",
    "Local historians – above all {person} – have written three books about this part of the country.",
    "The archive in {city} burned down in {year}, and much of what we know comes from letters.",
    "The weather is mild, and most travellers come in spring, when the cherry trees are in blossom.",
    "Above a door in the market street one can still read the Greek word “ξένος”, which means stranger.",
    "In {year} a storm tore the roofs from half the houses of the region.",
    "An old saying – “хлеб да соль” – is heard at weddings, though nobody speaks the language now.",
    "A street in {city} is named after {person}, who was born here in {year}.",
    "The census of {year} counted {many} families, and the one before it twice as many.",
    "“Is there a lovelier place than this?” asked {person} in a speech in {year}.",
    "The road from {city} is {kilometres} long and was paved in {year} by order of {person}.",
    "A museum in {city} shows paintings by {person} – small, dark and very expensive.",
]
