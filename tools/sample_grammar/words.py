"""The words of the bundled sample's grammar, all of it invented: the people, the companies and what is said of them."""

from dataclasses import dataclass


def _with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


@dataclass(frozen=True)
class Word:
    """A filler and, where there is one, the wider thing it belongs to."""

    text: str
    kind: str = ""

    @property
    def a(self) -> str:
        return _with_article(self.text)

    @property
    def kind_a(self) -> str:
        return _with_article(self.kind)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Person:
    """A filler that is somebody: first and last name, and the pronouns that go with them."""

    first: str
    last: str
    they: str
    their: str

    def __str__(self) -> str:
        return f"{self.first} {self.last}"


def _words(text: str) -> list[Word]:
    """Read "Lyon/France, Oslo/Norway" as fillers with their kinds."""
    return [Word(*" ".join(entry.split()).split("/")) for entry in text.split(",")]


_LAST = [
    "Keller",
    "Moreau",
    "Silva",
    "Okafor",
    "Lindqvist",
    "Novák",
    "Tanaka",
    "Rossi",
    "Haddad",
    "Peña",
    "Jørgensen",
    "Walsh",
    "Dubois",
    "Müller",
    "Castillo",
    "Mbeki",
    "Petrov",
    "Brandt",
    "García",
    "Fischer",
    "Adeyemi",
    "Larsen",
    "Kowalski",
    "Ferreira",
    "Hansen",
    "Moretti",
    "Sato",
    "Bauer",
    "Quinn",
    "Whitfield",
]
_SHE = [
    "Maria",
    "Elena",
    "Zoë",
    "Ingrid",
    "Amara",
    "Chloé",
    "Nadia",
    "Priya",
    "Yuki",
    "Leila",
    "Astrid",
    "Renée",
    "Fatima",
    "Hanna",
    "Lucía",
    "Grace",
    "Olga",
    "Clara",
]
_HE = [
    "Jonas",
    "André",
    "Tomás",
    "Viktor",
    "Kofi",
    "Søren",
    "Daniel",
    "Rafael",
    "Kenji",
    "Omar",
    "Pavel",
    "Björn",
    "Luca",
    "Samuel",
    "Mateo",
    "Anton",
    "Hugo",
    "Ivan",
]
PEOPLE = [
    Person(first, last, they, their)
    for last in _LAST
    for names, they, their in ((_SHE, "she", "her"), (_HE, "he", "his"))
    for first in names
]
CITIES = _words(
    """Lyon/France, Toulouse/France, Oslo/Norway, Porto/Portugal, Kyoto/Japan, Osaka/Japan, Nairobi/Kenya, Lima/Peru,
    Kraków/Poland, Ghent/Belgium, Zürich/Switzerland, Montréal/Canada, São Paulo/Brazil, Bologna/Italy, Naples/Italy,
    Seville/Spain, Dublin/Ireland, Accra/Ghana, Uppsala/Sweden, Hamburg/Germany, Munich/Germany, Glasgow/Scotland,
    Mumbai/India, Cairo/Egypt, Seoul/South Korea, Auckland/New Zealand, Bogotá/Colombia, Athens/Greece, Vienna/Austria,
    Helsinki/Finland, Istanbul/Turkey, Hanoi/Vietnam, Melbourne/Australia, Havana/Cuba"""
)
JOBS = _words(
    """chemist/scientist, physicist/scientist, botanist/scientist, violinist/musician, pianist/musician,
    cellist/musician, novelist/writer, poet/writer, sculptor/artist, painter/artist, surgeon/doctor,
    cardiologist/doctor, sprinter/athlete, swimmer/athlete, lawyer/legal expert, judge/legal expert"""
)
YEARS = [Word(str(year), f"{year // 10}0s") for year in range(1903, 1999, 5)]
MONTHS = _words("January, February, March, April, May, June, July, August, September, October, November, December")
COUNTS = _words("40, 75, 120, 260, 310, 450, 580, 700, 900, 1500, 2000, 3400, 5000, 8000, 12000")
PRICES = _words("3 million, 7 million, 12 million, 18 million, 25 million, 40 million, 60 million, 90 million")
COMPANIES = _words(
    """Norvik Foods, Halden Motors, Brightwater Energy, Lumière Glass, Tessera Software, Red Harbour Shipping,
    Quill Press, Alder Pharma, Kestrel Airlines, Blue Cedar Bank, Orion Textiles, Ferrox Steel, Maple Lane Toys,
    Solvang Dairy, Pinnacle Cement, Ravel Electronics"""
)
GOODS = _words(
    """bicycles, violins, ceramic tiles, chocolate, solar panels, tractors, fishing boats, hearing aids, wool blankets,
    cameras, school desks, bread ovens"""
)
INVENTIONS = _words(
    """folding bicycle, pocket telescope, electric kettle, paper filter, steam tractor, safety lamp, typewriter for the
    blind, portable X-ray machine, self-winding clock, rescue helmet, water pump, weather balloon"""
)
CLUBS = _words(
    """Ashford Rovers, Eastport United, Kingsley Town, Vallmar, Real Montera, Nordby, Stellan City, Fairhaven,
    Dynamo Orlov, Olympic Vara, Port Lenox, Westmere Athletic"""
)
FESTIVALS = _words("jazz, film, poetry, theatre, kite, puppet, chocolate, lantern, book, dance")
MATERIALS = _words(
    "granite/stone, marble/stone, limestone/stone, oak/wood, cedar/wood, pine/wood, steel/metal, iron/metal, copper/metal"
)
BUILDINGS = _words(
    "bridge, library, concert hall, lighthouse, railway station, museum, town hall, market hall, observatory"
)
ANIMALS = _words(
    """beetle/insect, moth/insect, butterfly/insect, tree frog/amphibian, salamander/amphibian, gecko/reptile,
    lizard/reptile, parrot/bird, owl/bird, orchid/plant, fern/plant"""
)
COUNTRIES = _words(
    "Brazil, Kenya, Vietnam, Peru, India, Madagascar, Colombia, Indonesia, Mexico, Cameroon, Nepal, Cuba"
)
PAINTINGS = _words(
    '''"The Red Orchard", "Winter Harbour", "Two Sisters", "The Clockmaker", "Morning at Sea", "The Yellow House",
    "Girl with Lemons", "The Last Ferry", "Night Market", "Field of Crows"'''
)
DISASTERS = _words("storm, flood, fire, earthquake, landslide, explosion, avalanche, heat wave")
ORGANISATIONS = _words(
    """the National Library, the Red Cross, the Royal Opera, the Space Agency, the Central Bank, the Film Academy,
    the Botanical Garden, the Railway Union, the Chess Federation, the Polar Institute"""
)
