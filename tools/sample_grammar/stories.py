"""The stories that the bundled sample tells, with the words of `words`.

A story is told about a few slots, each filled from a table. In a template `{home}` is a filler's own name and
`{home.kind}` the wider thing it belongs to (a city's country, a cellist's "musician", a year's decade);
`.a` and `.kind_a` put the article in front. People have `.last`, `.they` and `.their` besides.
Whoever adds a template keeps three promises, since nothing else makes the labels true:

1. every premise that names a slot says enough to settle every hypothesis about that slot;
2. asides name no slot that a hypothesis asks for, the story's leading one excepted, and settle nothing;
3. the same sentence with another filler from the same table is still good English.
"""

from dataclasses import dataclass

from sample_grammar.words import (
    ANIMALS,
    BUILDINGS,
    CITIES,
    CLUBS,
    COMPANIES,
    COUNTRIES,
    COUNTS,
    DISASTERS,
    FESTIVALS,
    GOODS,
    INVENTIONS,
    JOBS,
    MATERIALS,
    MONTHS,
    ORGANISATIONS,
    PAINTINGS,
    PEOPLE,
    PRICES,
    YEARS,
)


@dataclass(frozen=True)
class Story:
    """What can be told about one thing.

    slots       slot -> table; two slots of one table never hold the same filler
    premises    each names some of the slots
    asides      sentences that may follow any premise
    hypotheses  slot -> what may be said whose truth hangs on that slot's filler
    """

    slots: dict[str, list]
    premises: list[str]
    asides: list[str]
    hypotheses: dict[str, list[str]]


STORIES = [
    Story(
        {"who": PEOPLE, "born": CITIES, "home": CITIES, "job": JOBS},
        [
            "{who}, {job.a} who was born in {born} and now lives in {home}, received the national medal on Tuesday.",
            "Born in {born}, {who} trained as {job.a} and has lived in {home} for eleven years.",
            "{who}, {job.a}, still remembers the streets of {born}, where {who.they} was born.",
            "The mayor of {home} has thanked {who}, a native of {born} who lives in the city and works there as {job.a}.",
            "{who} left {born}, the town of {who.their} birth, as a child; today {who.they} is {job.a} and lives in {home}.",
            "Neighbours in {home}, where {who} lives, were surprised to learn that the quiet {job} next door is famous.",
        ],
        [
            'In an interview, {who.last} said: "I never planned any of this."',
            "A radio programme about {who.their} life will be broadcast in the spring.",
            "{who.last} is married and has three children.",
            "More than a hundred guests came to the ceremony, among them two ministers and a choir of school children.",
            "{who.last} rarely speaks to the press.",
            "The prize is given every four years by a private foundation.",
        ],
        {
            "born": [
                "{who} was born in {born}.",
                "{who} is a native of {born}.",
                "{born} is the birthplace of {who}.",
                "{who} was born in {born.kind}.",
            ],
            "home": ["{who} lives in {home}.", "The home of {who} is in {home}.", "{who} lives in {home.kind}."],
            "job": ["{who} is {job.a}.", "{who} works as {job.a}.", "{who} is {job.kind_a}."],
        },
    ),
    Story(
        {"firm": COMPANIES, "founder": PEOPLE, "chief": PEOPLE, "city": CITIES, "year": YEARS, "goods": GOODS},
        [
            "{firm}, founded in {year} by {founder}, makes {goods} in a factory outside {city}.",
            "{founder} founded {firm} in {city} in {year}; the company is now run by {chief}.",
            "The chief executive of {firm}, {chief}, said on Monday that demand for its {goods} had never been higher.",
            "{firm}, the maker of {goods} based in {city}, celebrates its founder {founder}, who opened the first workshop in {year}.",
            "Workers at {firm}, which has produced {goods} in {city} since it was founded in {year}, voted for a new contract.",
            "{chief} took over as head of {firm} from the founder, {founder}, and moved the company to {city}.",
        ],
        [
            'A spokesman said the results were "better than we feared".',
            "Shares rose slightly in early trading.",
            "The company has never published its profits.",
            "Two smaller rivals closed last year, and a third is looking for a partner abroad.",
            "New machines will be delivered before the end of the summer, according to people who know the plans.",
            "Unions have asked for a meeting.",
        ],
        {
            "founder": [
                "{founder} founded {firm}.",
                "{firm} was founded by {founder}.",
                "The founder of {firm} is {founder}.",
            ],
            "chief": ["{chief} runs {firm}.", "{firm} is led by {chief}.", "{chief} is the head of {firm}."],
            "city": [
                "{firm} is based in {city}.",
                "{firm} is a company from {city}.",
                "{firm} is based in {city.kind}.",
            ],
            "year": [
                "{firm} was founded in {year}.",
                "{firm} has existed since {year}.",
                "{firm} was founded in the {year.kind}.",
            ],
            "goods": ["{firm} makes {goods}.", "{firm} is a producer of {goods}.", "{goods.text} are made by {firm}."],
        },
    ),
    Story(
        {"buyer": COMPANIES, "seller": COMPANIES, "price": PRICES, "month": MONTHS},
        [
            "{buyer} bought {seller} for {price} dollars in {month}.",
            "{seller} was sold to {buyer} in {month} for {price} dollars, ending months of rumours.",
            "Regulators have approved the purchase of {seller} by {buyer}, which paid {price} dollars.",
            "In {month}, {buyer} completed its takeover of {seller}, one of the largest deals of the year.",
            "The owners of {seller} accepted an offer of {price} dollars from {buyer} and the sale was closed in {month}.",
        ],
        [
            "Analysts were divided about the deal.",
            'One banker called it "a marriage of equals".',
            "No jobs will be lost, both sides promised.",
            "The two companies have shared a warehouse for many years and know each other well.",
            "The new owner wants to keep the name.",
        ],
        {
            "buyer": [
                "{buyer} bought {seller}.",
                "{seller} was bought by {buyer}.",
                "{seller} now belongs to {buyer}.",
            ],
            "price": ["{buyer} paid {price} dollars for {seller}.", "The price of {seller} was {price} dollars."],
            "month": ["{buyer} bought {seller} in {month}.", "The sale of {seller} took place in {month}."],
        },
    ),
    Story(
        {"who": PEOPLE, "thing": INVENTIONS, "year": YEARS, "city": CITIES, "job": JOBS},
        [
            "{who} invented the {thing} in {year} in a rented room in {city}.",
            "The {thing} was invented by {who}, {job.a} from {city}, in {year}.",
            "An exhibition about the {thing}, which {who} invented, has opened to the public.",
            "It was {who}, {job.a}, who in {year} came up with the {thing} after months of failed experiments.",
            "In {year} a little-known inventor in {city}, {who}, patented the first {thing}.",
        ],
        [
            "At first nobody wanted to buy it.",
            'A newspaper of the day called it "a useless toy".',
            "The original drawings were lost in a fire and found again only recently in the attic of a parish church.",
            "Today the early models are sought by collectors.",
            "The patent earned its owner very little money.",
        ],
        {
            "who": [
                "{who} invented the {thing}.",
                "The {thing} was invented by {who}.",
                "The inventor of the {thing} is {who}.",
            ],
            "thing": ["{who} invented the {thing}.", "{who} is the inventor of the {thing}."],
            "year": [
                "The {thing} was invented in {year}.",
                "{who} invented the {thing} in {year}.",
                "The {thing} was invented in the {year.kind}.",
            ],
            "city": ["The inventor of the {thing} was from {city}."][:0]
            or ["The {thing} comes from {city}.", "The {thing} comes from {city.kind}."],
            "job": ["The inventor {who} was {job.a}.", "{who} was {job.kind_a}."],
        },
    ),
    Story(
        {"kind": BUILDINGS, "who": PEOPLE, "year": YEARS, "city": CITIES, "stuff": MATERIALS},
        [
            "The old {kind} in {city}, built of {stuff} in {year}, will be repaired.",
            "{who} designed the {kind} of {city}, which was built in {year}.",
            "Visitors to {city} admire the {kind} that the architect {who} built entirely of {stuff}.",
            "Built of {stuff} to plans by {who}, the {kind} in {city} was finished in {year} after many delays.",
            "The {kind} in {city} has been a protected monument since last week; {who} designed it in {stuff}, and it was built in {year}.",
        ],
        [
            "The work will cost more than was expected.",
            'Residents call it "the old lady".',
            "It survived two wars and a flood almost without damage, to the surprise of the engineers who examined it.",
            "It is closed on Mondays.",
            "School classes can visit free of charge.",
        ],
        {
            "who": [
                "{who} designed the {kind} in {city}.",
                "The {kind} in {city} was designed by {who}.",
                "{who} was the architect of the {kind} in {city}.",
            ],
            "year": [
                "The {kind} in {city} was built in {year}.",
                "The {kind} in {city} was built in the {year.kind}.",
                "The {kind} in {city} dates from {year}.",
            ],
            "stuff": [
                "The {kind} in {city} is made of {stuff}.",
                "The {kind} in {city} is a building of {stuff.kind}.",
            ],
            "city": ["The {kind} is in {city}.", "The {kind} stands in {city.kind}."],
        },
    ),
    Story(
        {"what": FESTIVALS, "city": CITIES, "month": MONTHS, "count": COUNTS, "who": PEOPLE},
        [
            "About {count} people came to the {what} festival in {city} in {month}.",
            "The {what} festival in {city}, directed by {who}, drew {count} visitors this {month}.",
            "{who}, the director of the {what} festival in {city}, announced that it will be held in {month} again.",
            "Rain did not stop the {what} festival, which is held every {month} in {city}: {count} tickets were sold.",
            "Hotels in {city} are full every {month} because of the {what} festival directed by {who}.",
        ],
        [
            'The local paper wrote of "a week without sleep".',
            "Trains will run all night.",
            "The programme is printed in four languages and can be had at the town hall.",
            "Most events are free.",
            "The festival began as a meeting of a few friends in a garden behind the station.",
        ],
        {
            "what": ["There is a {what} festival in {city}.", "{city} has a {what} festival."],
            "city": ["The {what} festival takes place in {city}.", "The {what} festival takes place in {city.kind}."],
            "month": [
                "The {what} festival in {city} is held in {month}.",
                "In {month} there is a {what} festival in {city}.",
            ],
            "count": [
                "The {what} festival in {city} had {count} visitors.",
                "{count} people visited the {what} festival in {city}.",
            ],
            "who": [
                "{who} directs the {what} festival in {city}.",
                "The director of the {what} festival in {city} is {who}.",
            ],
        },
    ),
    Story(
        {"winner": CLUBS, "loser": CLUBS, "scorer": PEOPLE, "coach": PEOPLE, "count": COUNTS},
        [
            "{winner} beat {loser} on Saturday in front of {count} spectators.",
            "{loser} lost to {winner} after a late goal by {scorer}.",
            "A goal by {scorer} gave {winner} the victory over {loser}, and {coach}, the coach, thanked the {count} fans.",
            "{coach} coached {winner} to the cup with a win against {loser}, in which {scorer} scored the only goal.",
            "{loser} were beaten by {winner} on a wet afternoon watched by {count} people.",
        ],
        [
            "The referee showed four yellow cards.",
            '"We were lucky," one of the players admitted.',
            "It was the last match before the winter break, and the pitch was in a poor state.",
            "The next round is played in a fortnight.",
            "The game started half an hour late.",
        ],
        {
            "winner": [
                "{winner} won the match against {loser}.",
                "{winner} defeated {loser}.",
                "{winner} were the winners.",
            ],
            "scorer": ["{scorer} scored a goal.", "The goal was scored by {scorer}."],
            "coach": ["{coach} is the coach of {winner}.", "{winner} are coached by {coach}."],
            "count": ["{count} people watched the match.", "The match was seen by {count} spectators."],
        },
    ),
    Story(
        {"winner": PEOPLE, "loser": PEOPLE, "city": CITIES, "month": MONTHS, "job": JOBS},
        [
            "{winner} was elected mayor of {city} in {month}, defeating {loser}.",
            "Voters in {city} chose {winner}, {job.a}, over {loser} as their new mayor.",
            "{winner}, a former {job}, became mayor of {city} in {month}.",
            "{loser} admitted defeat on Sunday night and wished {winner}, the new mayor of {city}, good luck.",
            "In {month} the people of {city} elected {winner}, once {job.a}, as mayor.",
        ],
        [
            "Turnout was the highest in twenty years.",
            '"The buses come first," was the promise that many voters remembered.',
            "The count lasted until the early morning because a box of ballots had been left in a school gymnasium.",
            "The city council will meet next week.",
            "Parking was the main issue of the campaign.",
        ],
        {
            "winner": [
                "{winner} is the mayor of {city}.",
                "{winner} won the election in {city}.",
                "{city} elected {winner} as mayor.",
            ],
            "city": ["{winner} is the mayor of {city}.", "{winner} was elected mayor of a city in {city.kind}."],
            "month": ["The election in {city} took place in {month}.", "{winner} was elected in {month}."],
            "job": ["{winner} was {job.a} before.", "{winner} has been {job.kind_a}."],
        },
    ),
    Story(
        {"who": PEOPLE, "animal": ANIMALS, "land": COUNTRIES, "year": YEARS, "city": CITIES},
        [
            "{who} of the University of {city} has discovered a new {animal} in {land}.",
            "A {animal} unknown to science was found in {land} by an expedition under {who}.",
            "In {year}, during a journey through {land}, {who} was the first to describe the {animal} that now bears {who.their} name.",
            "The {animal} that {who} discovered in {land} in {year} is shown in the museum of {city}.",
        ],
        [
            "Only a few dozen are thought to survive.",
            "Its closest relatives live thousands of kilometres away.",
            'Colleagues spoke of "a small sensation".',
            "It is active at night and had been overlooked because it hides under dead leaves during the day.",
            "The valley where it lives is threatened by a dam.",
        ],
        {
            "who": [
                "{who} discovered a new {animal}.",
                "A new {animal} was discovered by {who}.",
                "The {animal} was discovered by {who}.",
            ],
            "animal": ["{who} discovered {animal.a}.", "{who} discovered {animal.kind_a}."],
            "land": [
                "The {animal} was discovered in {land}.",
                "{who} found the {animal} in {land}.",
                "The {animal} lives in {land}.",
            ],
            "year": ["The {animal} was discovered in {year}.", "{who} found the {animal} in the {year.kind}."],
        },
    ),
    Story(
        {"title": PAINTINGS, "painter": PEOPLE, "buyer": PEOPLE, "price": PRICES, "year": YEARS, "city": CITIES},
        [
            "{title}, painted by {painter} in {year}, was sold at auction in {city} for {price} euros.",
            "{buyer} paid {price} euros for {title}, a painting by {painter}.",
            "The collector {buyer} has bought {title}, which {painter} painted in {year}, and will show it in {city}.",
            "The museum in {city} has received {title} by {painter} as a gift from {buyer}, who had bought it for {price} euros.",
        ],
        [
            "Experts had expected much less.",
            "The frame is thought to be original.",
            "It had hung for decades in the dining room of a country doctor, who took it for a copy.",
            "The picture was cleaned last year.",
            "A second version is said to exist in a private house.",
        ],
        {
            "painter": [
                "{title} is a work by {painter}.",
                "{painter} painted {title}.",
                "{title} was painted by {painter}.",
            ],
            "buyer": ["{buyer} bought {title}.", "{title} was bought by {buyer}."],
            "price": ["{title} was sold for {price} euros.", "The price of {title} was {price} euros."],
            "year": ["{title} was painted in {year}.", "{title} is a painting from the {year.kind}."],
            "title": ["{painter} painted {title}.", "{title} is a painting by {painter}."],
            "city": ["{title} can be seen in {city}."][:0]
            or ["{title} was brought to {city}.", "{title} was brought to {city.kind}."],
        },
    ),
    Story(
        {"what": DISASTERS, "city": CITIES, "count": COUNTS, "month": MONTHS, "who": PEOPLE},
        [
            "{count} houses were damaged when {what.a} hit {city} in {month}.",
            "After the {what} in {city} the rescue work was led by {who}, and {count} families had to leave their damaged houses.",
            "The {what} that struck {city} in {month} damaged {count} houses, said {who}, who led the rescue work.",
            "{who} led the rescue teams in {city}, where {what.a} had damaged {count} houses.",
        ],
        [
            "Nobody was seriously hurt.",
            "Schools will stay closed until Thursday.",
            '"It sounded like a train," a baker said.',
            "Volunteers from the neighbouring villages brought blankets, soup and a mobile kitchen during the night.",
            "The government has promised help.",
        ],
        {
            "what": ["There was {what.a} in {city}.", "{city} was hit by {what.a}."],
            "city": [
                "The {what} struck {city}.",
                "The {what} happened in {city}.",
                "The {what} happened in {city.kind}.",
            ],
            "count": ["{count} houses were damaged in {city}.", "The {what} in {city} damaged {count} houses."],
            "month": ["The {what} in {city} happened in {month}.", "{city} was hit in {month}."],
            "who": ["{who} led the rescue work in {city}.", "The rescue in {city} was led by {who}."],
        },
    ),
    Story(
        {"new": PEOPLE, "old": PEOPLE, "place": ORGANISATIONS, "job": JOBS, "month": MONTHS, "born": CITIES},
        [
            "{new} will succeed {old} as director of {place} in {month}.",
            "{old} hands over the post of director of {place} to {new}, {job.a} from {born}.",
            "{place.text} has a new director from {month}: {new}, {job.a} by training, replaces {old}.",
            "In {month}, {new}, who was born in {born}, takes over from {old} as director of {place}.",
        ],
        [
            "The board voted unanimously.",
            "The staff learned of it from the morning news.",
            '"I shall miss the noise," was the only comment at the farewell party.',
            "The salary has not been made public, which led to questions in parliament earlier this week.",
            "There were forty applications.",
        ],
        {
            "new": ["{new} is the new director of {place}.", "{new} succeeds another director of {place}."],
            "place": ["{new} becomes director of {place}.", "The new employer of {new} is {place}."],
            "job": ["{new} is {job.a}.", "{new} is {job.kind_a}."],
            "month": ["{new} becomes director in {month}.", "{old} leaves {place} in {month}."],
            "born": ["{new} comes from {born}.", "{new} comes from {born.kind}."],
        },
    ),
]
