create temp table city as select i as id, 'city ' || (i * 7919 % 1000) as name, i % 17 as region from generate_series(1, 500) i;

create temp table person as select i as id, 'name ' || (i::bigint * 104729 % 99991) as name, 1 + i * 31 % 500 as city, 18 + i * 13 % 70 as age, repeat('x', 10 + i % 50) as note from generate_series(1, 60000) i;

create index on person (name);

create index on person (city, age);

select c.region, count(*), sum(p.age), max(p.name) from person p join city c on c.id = p.city group by c.region order by c.region;

update person set note = note || ' changed' where id % 3 = 0;

delete from person where id % 5 = 0;

select count(distinct name), sum(length(note)) from person;

select sum(length(t)) from (select jsonb_build_object('id', id, 'name', name, 'tags', jsonb_build_array(age, city, note))::text as t from person) x;

select sum((t->>'id')::int), count(distinct t->>'name') from (select row_to_json(p)::jsonb as t from person p) x;

select count(*) from (select name, array_agg(id order by id) as ids from person group by name) x where array_length(ids, 1) > 1;

select sum(place) from (select row_number() over (partition by city order by age, id) as place from person) x;

select count(*), sum(length(w)) from person, regexp_split_to_table(note || ' ' || name, ' ') w;

